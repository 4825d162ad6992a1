#include "arguments.h"

#include <stdlib.h>

uint64_t *room_for(Table *self, Py_ssize_t count)
{
    if (count >= self->room) {
        self->room = count + 512;
        self->scratch = must(realloc(self->scratch, (size_t)self->room * sizeof *self->scratch));
    }
    return self->scratch;
}

/* PyLong_AsUnsignedLongLong, several times as fast for most hashes, which CPython 3.11 stores in two or three digits. */
static uint64_t number_of(PyObject *from)
{
#if PY_VERSION_HEX < 0x030C0000 && PYLONG_BITS_IN_DIGIT == 30
    if (PyLong_CheckExact(from) && (Py_SIZE(from) == 3 || Py_SIZE(from) == 2)) {
        const digit *digits = ((PyLongObject *)from)->ob_digit;
        uint64_t upper = Py_SIZE(from) == 3 ? digits[2] : 0;
        if (upper < 16)
            return upper << 60 | (uint64_t)digits[1] << 30 | digits[0];
    }
#endif
    return PyLong_AsUnsignedLongLong(from);
}

Py_ssize_t read_hashes(Table *self, PyObject *hashes)
{
    if (PyBytes_CheckExact(hashes)) {
        Py_ssize_t size = PyBytes_GET_SIZE(hashes), count = size / 8;
        if (size % 8) {
            PyErr_Format(PyExc_ValueError, "%zd bytes are not a whole number of 8-byte hashes", size);
            return -1;
        }
        uint64_t *into = room_for(self, count);
        memcpy(into, PyBytes_AS_STRING(hashes), (size_t)size);
        for (Py_ssize_t i = 0; i < count; i++)
            into[i] = __builtin_bswap64(into[i]);
        return count;
    }
    PyObject *list = PySequence_Fast(hashes, "hashes are bytes or a sequence of integers");
    if (list == NULL)
        return -1;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    uint64_t *into = room_for(self, count);
    for (Py_ssize_t i = 0; i < count; i++) {
        into[i] = number_of(PySequence_Fast_GET_ITEM(list, i));
        if (into[i] == UINT64_MAX && PyErr_Occurred()) {
            count = -1;
            break;
        }
    }
    Py_DECREF(list);
    return count;
}

bool read_number(PyObject *from, long least, long beyond, const char *name, long *number)
{
    *number = PyLong_AsLong(from);
    if (*number == -1 && PyErr_Occurred())
        return false;
    if (*number >= least && *number < beyond)
        return true;
    PyErr_Format(PyExc_ValueError, "%s is %ld", name, *number);
    return false;
}

bool is_count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return true;
    PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", wanted, given);
    return false;
}

bool open_array(PyObject *from, Py_buffer *array, Py_ssize_t itemsize, int flags)
{
    if (PyObject_GetBuffer(from, array, PyBUF_C_CONTIGUOUS | flags))
        return false;
    if (array->itemsize == itemsize)
        return true;
    PyErr_Format(PyExc_ValueError, "items of %zd bytes, not of %zd", array->itemsize, itemsize);
    PyBuffer_Release(array);
    return false;
}
