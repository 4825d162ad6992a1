/* See inline_cache.h. The global interpreter lock is held in all of this. */
#include "inline_cache.h"
#undef PyObject_GetAttr
#undef PyObject_VectorcallMethod
#undef CPyDict_GetItem

#include <structmember.h>

#define CHANGES_MAX 8 /* An item that changes more often is not remembered: its dictionary is no module's. */

/* Replace a held name. */
static void hold(PyObject **held, PyObject *name)
{
    PyObject *earlier = *held;
    Py_INCREF(name);
    *held = name;
    Py_XDECREF(earlier);
}

/* Dictionaries have versions of their own until CPython 3.12; 0: there is none. */
static uint64_t dict_version(PyObject *dict)
{
#if PY_VERSION_HEX < 0x030C0000
    return ((PyDictObject *)dict)->ma_version_tag;
#else
    return 0;
#endif
}

/* Remember where objects of this type have the attribute, if it is a slot or has a getter in C. */
static void note_attribute(PyTypeObject *type, PyObject *name, struct attribute_site *site)
{
    if (type->tp_getattro != PyObject_GenericGetAttr)
        return;
    PyObject *found = _PyType_Lookup(type, name); /* Borrowed. It also gives the type its version. */
    if (found == NULL || !PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG))
        return;
    if (Py_TYPE(found) == &PyMemberDescr_Type && PyType_IsSubtype(type, PyDescr_TYPE(found))) {
        const PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        if (member->type != T_OBJECT_EX || member->flags & READ_RESTRICTED)
            return;
        site->kind = SLOT;
        site->found.offset = member->offset;
    } else if (Py_TYPE(found) == &PyGetSetDescr_Type && PyType_IsSubtype(type, PyDescr_TYPE(found))) {
        const PyGetSetDef *getter = ((PyGetSetDescrObject *)found)->d_getset;
        if (getter->get == NULL)
            return;
        site->kind = GETTER;
        site->found.getter = getter;
    } else {
        return;
    }
    hold(&site->name, name);
    site->type = type;
    site->version = type->tp_version_tag;
}

static PyObject *find_attribute(PyObject *object, PyObject *name, struct attribute_site *site)
{
    if (!PyModule_CheckExact(object)) {
        note_attribute(Py_TYPE(object), name, site);
        return PyObject_GetAttr(object, name);
    }
    PyObject *value = PyObject_GetAttr(object, name), *dict = PyModule_GetDict(object);
    if (value != NULL && dict_version(dict) != 0 && PyDict_GetItem(dict, name) == value) {
        hold(&site->name, name);
        site->type = &PyModule_Type;
        site->kind = IN_MODULE;
        site->found.value = value;
        site->version = dict_version(dict);
    }
    return value;
}

PyObject *attribute_at(PyObject *object, PyObject *name, struct attribute_site *site)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject *value = NULL;
    if (site->type != type || site->name != name)
        return find_attribute(object, name, site);
    if (site->kind == IN_MODULE) {
        if (site->version == dict_version(PyModule_GetDict(object)))
            value = site->found.value;
    } else if (site->version == type->tp_version_tag) {
        if (site->kind == GETTER)
            return site->found.getter->get(object, site->found.getter->closure);
        if (site->kind == SLOT)
            value = *(PyObject **)((char *)object + site->found.offset);
    }
    if (value == NULL)
        return find_attribute(object, name, site);
    Py_INCREF(value);
    return value;
}

/* Whether the object can have attributes of its own, which would go before those of its type that are no data. */
static int has_own_attributes(PyObject *object, PyTypeObject *type)
{
    Py_ssize_t place = type->tp_dictoffset;
    if (PyType_HasFeature(type, Py_TPFLAGS_MANAGED_DICT) || place < 0)
        return 1;
    return place > 0 && *(PyObject **)((char *)object + place) != NULL;
}

/* The function that a call of this method calls with the object as its first argument; NULL if there is none. */
static PyObject *method_of(PyTypeObject *type, PyObject *name)
{
    if (type->tp_getattro != PyObject_GenericGetAttr)
        return NULL;
    PyObject *found = _PyType_Lookup(type, name); /* Borrowed. It also gives the type its version. */
    return found != NULL && PyType_HasFeature(Py_TYPE(found), Py_TPFLAGS_METHOD_DESCRIPTOR) ? found : NULL;
}

static PyObject *find_method(PyObject *name, PyObject *const *arguments, size_t number, PyObject *keywords,
                             struct method_site *site)
{
    PyTypeObject *type = Py_TYPE(arguments[0]);
    PyObject *function = has_own_attributes(arguments[0], type) ? NULL : method_of(type, name);
    if (function != NULL && PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) {
        hold(&site->name, name);
        site->type = type;
        site->function = function;
        site->version = type->tp_version_tag;
    }
    return PyObject_VectorcallMethod(name, arguments, number, keywords);
}

PyObject *call_method_at(PyObject *name, PyObject *const *arguments, size_t number, PyObject *keywords,
                         struct method_site *site)
{
    PyTypeObject *type = Py_TYPE(arguments[0]);
    if (site->type == type && site->name == name && site->version == type->tp_version_tag &&
        (type->tp_dictoffset == 0 || !has_own_attributes(arguments[0], type)))
        return PyObject_Vectorcall(site->function, arguments, (size_t)PyVectorcall_NARGS(number), keywords);
    return find_method(name, arguments, number, keywords, site);
}

static PyObject *find_item(PyObject *dict, PyObject *key, struct item_site *site)
{
    /* Only names are interned: a string that a client sends is never held. */
    int is_name = PyDict_CheckExact(dict) && PyUnicode_CheckExact(key) && PyUnicode_CHECK_INTERNED(key);
    uint64_t version = is_name ? dict_version(dict) : 0;
    PyObject *value = CPyDict_GetItem(dict, key);
    /* Comparing the name with other keys can run code that changes the dictionary. */
    if (value != NULL && version != 0 && version == dict_version(dict) && site->changes < CHANGES_MAX) {
        hold(&site->key, key);
        site->value = value;
        site->version = version;
        site->changes++;
    }
    return value;
}

PyObject *item_at(PyObject *dict, PyObject *key, struct item_site *site)
{
    if (site->key == key && PyDict_CheckExact(dict) && site->version == dict_version(dict)) {
        Py_INCREF(site->value);
        return site->value;
    }
    return find_item(dict, key, site);
}
