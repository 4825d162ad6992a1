#ifndef BATON_URL_FIELDS_H
#define BATON_URL_FIELDS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* See media.py. */
PyObject *may_have_urls(PyObject *module, PyObject *body);

#endif
