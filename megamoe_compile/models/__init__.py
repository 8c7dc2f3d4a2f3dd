"""What is known about models: shapes by name, and by Hugging Face configuration."""
