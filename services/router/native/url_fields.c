#include "url_fields.h"

#include <stdbool.h>
#include <string.h>

/* The ends of fields' names, also where JSON escapes hide some of their letters. */
static const char *const ENDS[] = {"url", "\\u0075rl", "\\u0072l", "\\u006c", "\\u006C"};

static bool ends_with_url(const char *begin, const char *end)
{
    for (size_t number = 0; number < sizeof ENDS / sizeof *ENDS; number++) {
        size_t size = strlen(ENDS[number]);
        if ((size_t)(end - begin) >= size && !memcmp(end - size, ENDS[number], size))
            return true;
    }
    return false;
}

PyObject *may_have_urls(PyObject *Py_UNUSED(module), PyObject *body)
{
    Py_buffer bytes;
    if (PyObject_GetBuffer(body, &bytes, PyBUF_SIMPLE))
        return NULL;
    const char *begin = bytes.buf, *end = begin + bytes.len, *quote = begin;
    bool found = false;
    /* Few of a body's bytes are quotes. */
    while (!found && quote < end && (quote = memchr(quote, '"', (size_t)(end - quote)))) {
        found = ends_with_url(begin, quote);
        quote++;
    }
    PyBuffer_Release(&bytes);
    return PyBool_FromLong(found);
}
