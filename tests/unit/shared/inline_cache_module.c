/* What shared/native/inline_cache.h looks up, at a few places that Python names by number. */
#include "inline_cache.h"
#undef CPyDict_GetItem

#define SITES 16

static struct attribute_site attributes[SITES];
static struct method_site methods[SITES];
static struct item_site items[SITES];

/* As mypyc's runtime has it. */
PyObject *CPyDict_GetItem(PyObject *dict, PyObject *key)
{
    if (!PyDict_CheckExact(dict))
        return PyObject_GetItem(dict, key);
    PyObject *value = PyDict_GetItemWithError(dict, key);
    if (value == NULL && !PyErr_Occurred())
        PyErr_SetObject(PyExc_KeyError, key);
    Py_XINCREF(value);
    return value;
}

static long site_of(PyObject *number)
{
    long site = PyLong_AsLong(number);
    return site >= 0 && site < SITES ? site : 0;
}

static PyObject *attribute(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t Py_UNUSED(given))
{
    return attribute_at(args[1], args[2], &attributes[site_of(args[0])]);
}

static PyObject *call_method(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    return call_method_at(args[1], args + 2, (size_t)(given - 2) | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL,
                          &methods[site_of(args[0])]);
}

static PyObject *item(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t Py_UNUSED(given))
{
    return item_at(args[1], args[2], &items[site_of(args[0])]);
}

static PyMethodDef functions[] = {
    {"attribute", (PyCFunction)(void (*)(void))attribute, METH_FASTCALL, "attribute(site, object, name)"},
    {"call_method", (PyCFunction)(void (*)(void))call_method, METH_FASTCALL, "call_method(site, name, object, *args)"},
    {"item", (PyCFunction)(void (*)(void))item, METH_FASTCALL, "item(site, dict, key)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "inline_cache_module", .m_methods = functions};

PyMODINIT_FUNC PyInit_inline_cache_module(void)
{
    return PyModule_Create(&definition);
}
