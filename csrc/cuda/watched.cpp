// Whether the tensors that captured graphs hold by address are still where they were: asked before
// every replay, of hundreds of dictionary entries, which from Python takes longer than the launch.
//
// What this costs is cache misses: between two replays, other programs evict what it reads. From
// Python 3.12 on, the interpreter tells when a watched dictionary changes. Until one does, entries
// are not looked up again, and a tensor costs half of the cache lines.
//
// Nothing here runs Python code, raises a Python exception or keeps a reference, so that no entry
// changes during a check and the garbage collector sees every reference where it is, in Python.
// The caller holds the GIL (ctypes.PyDLL).
//
// It only says whether something differs. Which tensor that is, and whether it matters (a subclass
// may keep its data elsewhere), is decided in megamoe_compile/capture/watched.py, in Python.

#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// custom_ops/cuda/watched.py mirrors the order of the fields, and keeps owner and key alive.
struct MegaMoEWatched {
    PyObject* owner;  // a dictionary: the parameters or the buffers of a module
    PyObject* key;
    const void* address;
    PyObject* found;  // the tensor there, which the dictionary keeps alive until it changes
};

struct MegaMoEWatch {
    MegaMoEWatched* entries;
    int64_t count;
    uint64_t changes;  // as it was when all entries were last found; 0 for never
};

}  // extern "C"

namespace {

static_assert(sizeof(MegaMoEWatched) == 32 && offsetof(MegaMoEWatched, found) == 24);
static_assert(sizeof(MegaMoEWatch) == 24 && offsetof(MegaMoEWatch, changes) == 16);

// How often watched dictionaries have changed, whoever watches them, and 1. The interpreter has
// eight watchers for all of a process, so there is one here for all watches.
uint64_t changes = 1;

#if PY_VERSION_HEX >= 0x030C0000

// Called before a watched dictionary changes or is freed.
int count_change(PyDict_WatchEvent, PyObject*, PyObject*, PyObject*) {
    ++changes;
    return 0;
}

bool watch_dictionary(PyObject* owner) noexcept {
    static const int watcher = PyDict_AddWatcher(count_change);
    // It is never given back: another watch may need it. A dictionary that nobody asks about any
    // more costs a call of the above per change.
    const bool watched = watcher >= 0 && PyDict_Watch(watcher, owner) == 0;
    if (!watched) PyErr_Clear();  // not a dictionary, or eight others were first
    return watched;
}

#else

bool watch_dictionary(PyObject*) noexcept { return false; }

#endif

bool find(MegaMoEWatched& entry) noexcept {
    entry.found = PyDict_GetItemWithError(entry.owner, entry.key);  // borrowed
    if (entry.found == nullptr) {
        PyErr_Clear();  // not a dictionary, or a key without a hash; most often just removed
        return false;
    }
    // Not THPVariable_Check: isinstance() may run Python code, and believes a proxy's __class__.
    return PyObject_TypeCheck(entry.found, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

bool in_place(const MegaMoEWatched& entry) noexcept {
    try {
        return THPVariable_Unpack(entry.found).const_data_ptr() == entry.address;
    } catch (...) {  // a tensor without data, such as a fake one
        return false;
    }
}

}  // namespace

extern "C" {

// Whether the interpreter tells of changes of all dictionaries from now on.
bool megamoe_watched_start(MegaMoEWatch* watch) noexcept {
    bool all = true;
    for (int64_t index = 0; index < watch->count; ++index)
        all = watch_dictionary(watch->entries[index].owner) && all;
    return all;
}

// The index of the first entry that is missing, not a tensor, or at another address; -1 for none.
// `watched`: as megamoe_watched_start said.
int64_t megamoe_watched_first_moved(MegaMoEWatch* watch, bool watched) noexcept {
    const uint64_t before = changes;
    const bool same = watched && watch->changes == before;
    for (int64_t index = 0; index < watch->count; ++index) {
        MegaMoEWatched& entry = watch->entries[index];
        if (!same && !find(entry)) return index;
        if (!in_place(entry)) return index;
    }
    watch->changes = before;
    return -1;
}

}  // extern "C"
