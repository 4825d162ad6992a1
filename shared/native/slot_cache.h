/* Attributes that are slots, read without the interpreter's general way: included before everything in what mypyc makes.
 *
 * mypyc reads an attribute of a class that it does not compile, such as a msgspec message, with PyObject_GetAttr. A
 * request does so some five hundred times, and each takes more than 200 instructions: a search of the type's bases, then
 * a descriptor's function, although the value lies at a fixed place in the object. Here that place is remembered for each
 * type and name, as CPython's own specializing interpreter does (PEP 659, LOAD_ATTR_SLOT). All else is left to
 * PyObject_GetAttr.
 */
#ifndef BATON_SLOT_CACHE_H
#define BATON_SLOT_CACHE_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#define SLOTS_KNOWN 4096 /* A power of two; two attributes with one place take turns. */

struct known_slot {
    PyTypeObject *type;
    PyObject *name;       /* Held, so that no other string can get its address. */
    unsigned int version; /* Of the type: CPython gives it another one when the type changes, and each only once. */
    Py_ssize_t offset;    /* 0: the attribute is no slot. */
};

extern struct known_slot known_slots[SLOTS_KNOWN];

/* The same as PyObject_GetAttr, and notes whether it is a slot. */
PyObject *find_attribute(PyObject *object, PyObject *name);

static inline struct known_slot *slot_place(PyTypeObject *type, PyObject *name)
{
    return &known_slots[(((uintptr_t)type >> 4) * 31 + ((uintptr_t)name >> 4)) & (SLOTS_KNOWN - 1)];
}

static inline PyObject *get_attribute(PyObject *object, PyObject *name)
{
    PyTypeObject *type = Py_TYPE(object);
    const struct known_slot *slot = slot_place(type, name);
    if (slot->type == type && slot->name == name && slot->version == type->tp_version_tag &&
        PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) {
        PyObject *value = slot->offset ? *(PyObject **)((char *)object + slot->offset) : NULL;
        if (value == NULL)
            return PyObject_GetAttr(object, name);
        Py_INCREF(value);
        return value;
    }
    return find_attribute(object, name);
}

#define PyObject_GetAttr get_attribute

#endif
