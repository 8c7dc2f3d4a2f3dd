"""The `megamoe` program; nothing else imports it."""
