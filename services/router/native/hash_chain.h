#ifndef BATON_HASH_CHAIN_H
#define BATON_HASH_CHAIN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Finds OpenSSL by the file of a library that uses it; "": in the program. Raises ImportError. */
PyObject *open_library(PyObject *module, PyObject *path);
/* See block_hash.py. */
PyObject *extend_chain(PyObject *module, PyObject *const *args, Py_ssize_t given);

#endif
