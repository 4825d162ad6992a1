/* What mypyc's code calls when something fails is said to be seldom called, so that the compiler keeps all that leads there
 * apart from the rest: error handling is a fifth of relay's code, and would take up the processor's caches.
 */
#ifndef BATON_ERROR_PATHS_H
#define BATON_ERROR_PATHS_H

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#define SELDOM __attribute__((cold))

void CPy_AddTraceback(const char *file, const char *function, int line, PyObject *globals) SELDOM;
void CPy_TypeError(const char *expected, PyObject *value) SELDOM;
void CPy_TypeErrorTraceback(const char *file, const char *function, int line, PyObject *globals, const char *expected,
                            PyObject *value) SELDOM;
void CPy_AttributeError(const char *file, const char *function, const char *type, const char *attribute, int line,
                        PyObject *globals) SELDOM;
void CPy_Raise(PyObject *exception) SELDOM;
void CPyError_OutOfMemory(void) SELDOM;

#endif
