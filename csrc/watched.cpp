// Whether the tensors that captured graphs hold by address are still where they were: asked before
// every replay, of hundreds of dictionary entries, which from Python takes longer than the launch.
//
// Nothing here runs Python code, raises a Python exception or keeps a reference, so that no entry
// changes during a check and the garbage collector sees every reference where it is, in Python.
// The caller holds the GIL (ctypes.PyDLL).
//
// It only says whether something differs. Which tensor that is, and whether it matters (a subclass
// may keep its data elsewhere), is decided in megamoe_compile/watched.py, in Python.

#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// custom_ops/watched_native.py mirrors the field order, and keeps both objects alive.
struct MegaMoEWatched {
    PyObject* owner;  // a dictionary: the parameters or the buffers of a module
    PyObject* key;
    const void* address;
};

}  // extern "C"

namespace {

static_assert(sizeof(MegaMoEWatched) == 24 && offsetof(MegaMoEWatched, address) == 16);

bool in_place(const MegaMoEWatched& entry) noexcept {
    PyObject* found = PyDict_GetItemWithError(entry.owner, entry.key);  // borrowed
    if (found == nullptr) {
        PyErr_Clear();  // not a dictionary, or a key without a hash; most often just removed
        return false;
    }
    // Not THPVariable_Check: isinstance() may run Python code, and believes a proxy's __class__.
    if (!PyObject_TypeCheck(found, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
        return false;
    }
    try {
        return THPVariable_Unpack(found).const_data_ptr() == entry.address;
    } catch (...) {  // a tensor without data, such as a fake one
        return false;
    }
}

}  // namespace

extern "C" {

// The index of the first entry that is missing, not a tensor, or at another address; -1 for none.
int64_t megamoe_watched_first_moved(const MegaMoEWatched* entries, int64_t count) noexcept {
    for (int64_t index = 0; index < count; ++index) {
        if (!in_place(entries[index])) return index;
    }
    return -1;
}

}  // extern "C"
