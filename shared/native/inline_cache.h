/* Inline caches for what mypyc's code looks up by name: included before each file that mypyc makes, not its runtime.
 *
 * Attributes of classes that mypyc does not compile, such as msgspec's messages, their methods, and names in modules
 * take more than a hundred instructions each to look up, and memory from all over: a type's bases, their dictionaries, a
 * descriptor. A request looks up some seven hundred. Here each place in the code remembers what it found last and where,
 * as CPython's own specializing interpreter does (PEP 659: LOAD_ATTR_SLOT, LOAD_GLOBAL_MODULE, LOAD_METHOD_NO_DICT). All
 * else is left to CPython.
 */
#ifndef BATON_INLINE_CACHE_H
#define BATON_INLINE_CACHE_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>
#include <CPy.h>
#include <stdint.h>

/* A name is held, so that no other string can get its address. CPython gives a type another version when it changes, and
 * each only once; likewise a dictionary.
 */
struct attribute_site {
    PyTypeObject *type;
    PyObject *name;
    union {
        Py_ssize_t offset;         /* Of the slot in objects of this type. */
        const PyGetSetDef *getter; /* The type holds it for as long as it has this version. */
        PyObject *value;           /* Of a module, which holds it for as long as its dictionary has this version. */
    } found;
    uint64_t version; /* Of the type, or of the module's dictionary. */
    enum { SLOT, GETTER, IN_MODULE } kind; /* Of what was found for the type, if there is one. */
};

struct method_site {
    PyTypeObject *type;
    PyObject *name;
    PyObject *function; /* The type holds it for as long as it has this version. */
    unsigned int version;
};

struct item_site {
    PyObject *key;
    PyObject *value; /* The dictionary holds it for as long as it has this version. */
    uint64_t version;
    int changes;
};

/* The same as PyObject_GetAttr, PyObject_VectorcallMethod and CPyDict_GetItem. */
PyObject *attribute_at(PyObject *object, PyObject *name, struct attribute_site *site);
PyObject *call_method_at(PyObject *name, PyObject *const *arguments, size_t count, PyObject *keywords,
                         struct method_site *site);
PyObject *item_at(PyObject *dict, PyObject *key, struct item_site *site);

#define PyObject_GetAttr(object, name)                                                                                 \
    (__extension__({                                                                                                   \
        static struct attribute_site site;                                                                             \
        attribute_at((object), (name), &site);                                                                         \
    }))

#define PyObject_VectorcallMethod(name, arguments, count, keywords)                                                    \
    (__extension__({                                                                                                   \
        static struct method_site site;                                                                                \
        call_method_at((name), (arguments), (count), (keywords), &site);                                               \
    }))

#define CPyDict_GetItem(dict, key)                                                                                     \
    (__extension__({                                                                                                   \
        static struct item_site site;                                                                                  \
        item_at((dict), (key), &site);                                                                                 \
    }))

#endif
