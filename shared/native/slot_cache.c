/* See slot_cache.h. The global interpreter lock is held in all of this. */
#include "slot_cache.h"
#undef PyObject_GetAttr

#include <structmember.h>

struct known_slot known_slots[SLOTS_KNOWN];

/* The place of the attribute in objects of this type; 0 if it is no slot. */
static Py_ssize_t slot_offset(PyTypeObject *type, PyObject *name)
{
    if (type->tp_getattro != PyObject_GenericGetAttr)
        return 0;
    PyObject *found = _PyType_Lookup(type, name); /* Borrowed. It also gives the type its version. */
    if (found == NULL || Py_TYPE(found) != &PyMemberDescr_Type || !PyType_IsSubtype(type, PyDescr_TYPE(found)))
        return 0;
    const PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
    return member->type == T_OBJECT_EX && !(member->flags & READ_RESTRICTED) ? member->offset : 0;
}

PyObject *find_attribute(PyObject *object, PyObject *name)
{
    PyTypeObject *type = Py_TYPE(object);
    Py_ssize_t offset = slot_offset(type, name);
    if (PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) {
        struct known_slot *slot = slot_place(type, name);
        PyObject *earlier = slot->name;
        Py_INCREF(name);
        *slot = (struct known_slot){type, name, type->tp_version_tag, offset};
        Py_XDECREF(earlier);
    }
    return PyObject_GetAttr(object, name);
}
