/* Checks and converts arguments from Python. On failure, each function sets a Python exception. */
#ifndef BATON_ARGUMENTS_H
#define BATON_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "block_table.h"

typedef struct {
    PyObject_HEAD
    struct block_table table;
    uint64_t *scratch; /* hashes as numbers */
    Py_ssize_t room;
} Table;

/* The scratch memory, grown to hold at least `count` hashes. */
uint64_t *room_for(Table *self, Py_ssize_t count);
/* Reads hashes into the scratch memory; returns their number, or -1. */
Py_ssize_t read_hashes(Table *self, PyObject *hashes);
bool read_number(PyObject *from, long least, long beyond, const char *name, long *number);
/* Whether the number of arguments is `wanted`. */
bool is_count(Py_ssize_t given, Py_ssize_t wanted);
/* A contiguous array of items of `itemsize` bytes; released by the caller. */
bool open_array(PyObject *from, Py_buffer *array, Py_ssize_t itemsize, int flags);

#endif
