/* Cuts texts into words, and looks up the tokens of each, as a Python type. text_cuts.py has the same in Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { CHARS = 0x800 }; /* No character beyond these is a letter here, or stands before a cut. */

typedef struct {
    PyObject_HEAD
    uint64_t letters[CHARS / 64], before[CHARS / 64];
    bool drops_space;
} Words;

static bool has(const uint64_t *set, Py_UCS4 one)
{
    return one < CHARS && set[one / 64] >> one % 64 & 1;
}

static bool fill(uint64_t *set, PyObject *chars)
{
    for (Py_ssize_t at = 0; at < PyUnicode_GET_LENGTH(chars); at++) {
        Py_UCS4 one = PyUnicode_READ_CHAR(chars, at);
        if (one >= CHARS) {
            PyErr_Format(PyExc_ValueError, "character %d is beyond %d", (int)one, CHARS - 1);
            return false;
        }
        set[one / 64] |= UINT64_C(1) << one % 64;
    }
    return true;
}

/* The characters of a text. */
struct text {
    int kind;
    const void *data;
    Py_ssize_t length;
};

static Py_ssize_t next_space(const struct text *text, Py_ssize_t at)
{
    if (text->kind == PyUnicode_1BYTE_KIND) {
        const char *begin = text->data, *found = memchr(begin + at, ' ', (size_t)(text->length - at));
        return found ? found - begin : text->length;
    }
    while (at < text->length && PyUnicode_READ(text->kind, text->data, at) != ' ')
        at++;
    return at;
}

/* The end of the word that begins at `at`: a space, unless it is the first character, or the end of the text. */
static Py_ssize_t word_end(const Words *self, const struct text *text, Py_ssize_t at)
{
    for (at = next_space(text, at + 1); at + 1 < text->length; at = next_space(text, at + 1))
        if (has(self->letters, PyUnicode_READ(text->kind, text->data, at + 1)) &&
            has(self->before, PyUnicode_READ(text->kind, text->data, at - 1)))
            return at;
    return text->length;
}

/* The word between `begin` and `end` in the form in which it is tokenized. */
static PyObject *word_of(const Words *self, PyObject *text, Py_ssize_t begin, Py_ssize_t end)
{
    return PyUnicode_Substring(text, begin > 0 && self->drops_space ? begin + 1 : begin, end);
}

static bool open_text(PyObject *from, struct text *text)
{
    if (!PyUnicode_Check(from) || PyUnicode_READY(from)) {
        PyErr_SetString(PyExc_TypeError, "the text must be a string");
        return false;
    }
    *text = (struct text){PyUnicode_KIND(from), PyUnicode_DATA(from), PyUnicode_GET_LENGTH(from)};
    return true;
}

static PyObject *cut(Words *self, PyObject *given)
{
    struct text text;
    PyObject *words = open_text(given, &text) ? PyList_New(0) : NULL;
    for (Py_ssize_t begin = 0, end; words && begin < text.length; begin = end) {
        end = word_end(self, &text, begin);
        PyObject *word = word_of(self, given, begin, end);
        if (word == NULL || PyList_Append(words, word))
            Py_CLEAR(words);
        Py_XDECREF(word);
    }
    return words;
}

/* Appends the tokens of a word, or the word to `missing` if neither dictionary has it. */
static bool recall_word(PyObject *word, PyObject *known, PyObject *more, PyObject *tokens, PyObject *missing)
{
    PyObject *packed = PyDict_GetItemWithError(known, word);
    if (packed == NULL && !PyErr_Occurred())
        packed = PyDict_GetItemWithError(more, word);
    if (packed == NULL)
        return !PyErr_Occurred() && !PyList_Append(missing, word);
    if (!PyTuple_Check(packed)) {
        PyErr_SetString(PyExc_TypeError, "the tokens of a word must be a tuple");
        return false;
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(packed); at++)
        if (PyList_Append(tokens, PyTuple_GET_ITEM(packed, at)))
            return false;
    return true;
}

static PyObject *recall(Words *self, PyObject *const *args, Py_ssize_t given)
{
    struct text text;
    if (given != 3 || !PyDict_Check(args[1]) || !PyDict_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "a text and two dictionaries are needed");
        return NULL;
    }
    if (!open_text(args[0], &text))
        return NULL;
    PyObject *tokens = PyList_New(0), *missing = PyList_New(0), *both = NULL;
    bool ok = tokens != NULL && missing != NULL;
    for (Py_ssize_t begin = 0, end; ok && begin < text.length; begin = end) {
        end = word_end(self, &text, begin);
        PyObject *word = word_of(self, args[0], begin, end);
        ok = word != NULL && recall_word(word, args[1], args[2], tokens, missing);
        Py_XDECREF(word);
    }
    if (ok)
        both = PyTuple_Pack(2, tokens, missing);
    Py_XDECREF(tokens);
    Py_XDECREF(missing);
    return both;
}

static PyObject *words_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *letters, *before;
    int drops_space;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "no argument may be named");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "UUp", &letters, &before, &drops_space))
        return NULL;
    Words *self = (Words *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->drops_space = drops_space;
    if (!fill(self->letters, letters) || !fill(self->before, before))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void words_dealloc(Words *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"cut", (PyCFunction)cut, METH_O, NULL},
    {"recall", (PyCFunction)(void (*)(void))recall, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Cuts texts into words; see text_cuts.py."},
    {Py_tp_new, words_new},
    {Py_tp_dealloc, words_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "services.router.native._words.NativeWords",
    .basicsize = sizeof(Words),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_words",
    .m_doc = "Words of texts in C.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__words(void)
{
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (made == NULL || type == NULL || PyModule_AddObject(made, "NativeWords", type)) {
        Py_XDECREF(made);
        Py_XDECREF(type);
        return NULL;
    }
    return made;
}
