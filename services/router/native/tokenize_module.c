/* Cuts texts into words, and finds the tokens of each, as a Python type. text_cuts.py has the same in Python. Texts are
   searched as UTF-8. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "hash_chain.h"
#include "words.h"

enum { CHARS = 0x800 }; /* What has at most two bytes in UTF-8. Nothing beyond stands beside a cut. */

typedef struct {
    PyObject_HEAD
    uint64_t behind[CHARS / 64], before[CHARS / 64];
    uint64_t ends[CHARS / 64]; /* Before these a word ends, if a letter precedes. */
    bool begins_token[256]; /* First bytes of `tokens`. */
    PyObject *tokens;       /* A tuple of bytes, none empty. */
    struct word_table table;
    bool drops_space;
} Words;

static bool has(const uint64_t *set, Py_UCS4 one)
{
    return one < CHARS && set[one / 64] >> one % 64 & 1;
}

/* A text, and how far it is cut. */
struct text {
    const char *bytes;
    size_t size;
    size_t word;     /* Where the next word begins. */
    size_t token;    /* Where the first added token from there begins, unless that is before `word`. */
    bool is_token_found;
    PyObject *owner; /* Of `bytes`; NULL: the string itself. */
};

static bool open_text(PyObject *from, struct text *text)
{
    *text = (struct text){0};
    if (!PyUnicode_Check(from) || PyUnicode_READY(from)) {
        PyErr_SetString(PyExc_TypeError, "the text must be a string");
        return false;
    }
    if (PyUnicode_IS_ASCII(from)) {
        text->bytes = PyUnicode_DATA(from);
        text->size = (size_t)PyUnicode_GET_LENGTH(from);
        return true;
    }
    text->owner = PyUnicode_AsUTF8String(from);
    if (text->owner == NULL)
        return false;
    text->bytes = PyBytes_AS_STRING(text->owner);
    text->size = (size_t)PyBytes_GET_SIZE(text->owner);
    return true;
}

static void close_text(struct text *text)
{
    Py_XDECREF(text->owner);
}

static unsigned char byte_at(const struct text *text, size_t at)
{
    return (unsigned char)text->bytes[at];
}

/* The character at `at`; CHARS: one with more than two bytes. */
static Py_UCS4 char_at(const struct text *text, size_t at)
{
    unsigned char one = byte_at(text, at);
    if (one < 0x80)
        return one;
    return one < 0xe0 ? (Py_UCS4)(one & 0x1f) << 6 | (text->bytes[at + 1] & 0x3f) : CHARS;
}

/* The character that ends before `end`. */
static Py_UCS4 char_before(const struct text *text, size_t end)
{
    unsigned char last = byte_at(text, end - 1);
    if (last < 0x80)
        return last;
    return byte_at(text, end - 2) < 0xc0 ? CHARS : char_at(text, end - 2);
}

/* Letters are all that may stand behind a cut and belong to an alphabet. */
static bool is_letter(const Words *self, Py_UCS4 one)
{
    return has(self->behind, one) && Py_UNICODE_ISALPHA(one);
}

/* Whether a word ends at `at`, which another character precedes. */
static bool is_cut(const Words *self, const struct text *text, size_t at)
{
    unsigned char one = byte_at(text, at);
    if (one == ' ')
        return at + 1 < text->token && has(self->behind, char_at(text, at + 1)) && has(self->before, char_before(text, at));
    return has(self->ends, one) && is_letter(self, char_before(text, at));
}

/* The size of the added token at `at`; 0: none begins there. */
static size_t token_size(const Words *self, const struct text *text, size_t at)
{
    if (at == text->size || !self->begins_token[byte_at(text, at)])
        return 0;
    for (Py_ssize_t number = 0; number < PyTuple_GET_SIZE(self->tokens); number++) {
        PyObject *token = PyTuple_GET_ITEM(self->tokens, number);
        size_t size = (size_t)PyBytes_GET_SIZE(token);
        if (size <= text->size - at && memcmp(PyBytes_AS_STRING(token), text->bytes + at, size) == 0)
            return size;
    }
    return 0;
}

/* The first added token from `at` on, or the end of the text. */
static size_t next_token(const Words *self, const struct text *text, size_t at)
{
    for (; at < text->size; at++) {
        while (at < text->size && !self->begins_token[byte_at(text, at)])
            at++;
        if (token_size(self, text, at))
            break;
    }
    return at < text->size ? at : text->size;
}

/* The end of the next word: of an added token, or before one, before a space or an end of words, or of the text. */
static size_t word_end(const Words *self, struct text *text)
{
    if (text->token < text->word || !text->is_token_found) {
        text->is_token_found = true;
        text->token = next_token(self, text, text->word);
    }
    if (text->token == text->word)
        return text->word + token_size(self, text, text->token);
    size_t at = text->word + 1;
    while (at < text->token && !is_cut(self, text, at))
        at++;
    return at;
}

/* The next word, in the form in which it is tokenized; false at the end. */
static bool next_word(const Words *self, struct text *text, struct bytes *word)
{
    size_t begin = text->word;
    if (begin == text->size)
        return false;
    text->word = word_end(self, text);
    if (begin > 0 && self->drops_space)
        begin++;
    *word = (struct bytes){text->bytes + begin, text->word - begin};
    return true;
}

/* Appends an object, whose reference it takes; NULL is a failure. */
static bool append(PyObject *list, PyObject *one)
{
    bool ok = one && !PyList_Append(list, one);
    Py_XDECREF(one);
    return ok;
}

static bool append_word(PyObject *list, struct bytes word)
{
    return append(list, PyUnicode_DecodeUTF8(word.begin, (Py_ssize_t)word.size, NULL));
}

static PyObject *cut(Words *self, PyObject *given)
{
    struct text text;
    struct bytes word;
    if (!open_text(given, &text))
        return NULL;
    PyObject *words = PyList_New(0);
    while (words && next_word(self, &text, &word))
        if (!append_word(words, word))
            Py_CLEAR(words);
    close_text(&text);
    return words;
}

/* The tokens of known words that follow each other. */
struct run {
    char *bytes;
    size_t size, room;
};

static bool extend(struct run *run, struct bytes tokens)
{
    if (tokens.size > run->room - run->size) {
        size_t room = 2 * (run->size + tokens.size);
        char *bytes = PyMem_Realloc(run->bytes, room);
        if (bytes == NULL) {
            PyErr_NoMemory();
            return false;
        }
        run->bytes = bytes;
        run->room = room;
    }
    memcpy(run->bytes + run->size, tokens.begin, tokens.size);
    run->size += tokens.size;
    return true;
}

static bool append_run(PyObject *runs, struct run *run)
{
    bool ok = append(runs, PyBytes_FromStringAndSize(run->bytes, (Py_ssize_t)run->size));
    run->size = 0;
    return ok;
}

static bool recall_words(const Words *self, struct text *text, struct run *run, PyObject *runs, PyObject *unknown)
{
    struct bytes word, tokens;
    while (next_word(self, text, &word)) {
        bool ok = words_find(&self->table, word, &tokens) ? extend(run, tokens)
                                                          : append_run(runs, run) && append_word(unknown, word);
        if (!ok)
            return false;
    }
    return append_run(runs, run);
}

static PyObject *recall(Words *self, PyObject *given)
{
    struct text text;
    if (!open_text(given, &text))
        return NULL;
    /* Most words have a token or two, of at most three bytes each. */
    struct run run = {.room = text.size + 16};
    run.bytes = PyMem_Malloc(run.room);
    PyObject *runs = run.bytes ? PyList_New(0) : PyErr_NoMemory(), *unknown = PyList_New(0), *both = NULL;
    if (runs && unknown && recall_words(self, &text, &run, runs, unknown))
        both = PyTuple_Pack(2, runs, unknown);
    Py_XDECREF(runs);
    Py_XDECREF(unknown);
    PyMem_Free(run.bytes);
    close_text(&text);
    return both;
}

static bool learn_word(Words *self, PyObject *word, PyObject *tokens)
{
    struct text text;
    struct bytes before;
    if (!PyBytes_Check(tokens)) {
        PyErr_SetString(PyExc_TypeError, "the tokens of a word must be bytes");
        return false;
    }
    if (!open_text(word, &text))
        return false;
    struct bytes whole = {text.bytes, text.size};
    struct bytes packed = {PyBytes_AS_STRING(tokens), (size_t)PyBytes_GET_SIZE(tokens)};
    bool ok = words_find(&self->table, whole, &before) || words_add(&self->table, whole, packed);
    if (!ok)
        PyErr_NoMemory();
    close_text(&text);
    return ok;
}

static PyObject *learn(Words *self, PyObject *words)
{
    if (!PyDict_Check(words)) {
        PyErr_SetString(PyExc_TypeError, "a dictionary of words and their tokens is needed");
        return NULL;
    }
    PyObject *word, *tokens;
    for (Py_ssize_t at = 0; PyDict_Next(words, &at, &word, &tokens);)
        if (!learn_word(self, word, tokens))
            return NULL;
    return PyLong_FromSize_t(self->table.count);
}

static PyObject *keep(Words *self, PyObject *Py_UNUSED(none))
{
    words_keep(&self->table);
    Py_RETURN_NONE;
}

static PyObject *forget(Words *self, PyObject *Py_UNUSED(none))
{
    words_forget(&self->table);
    Py_RETURN_NONE;
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

static bool fill_tokens(Words *self, PyObject *tokens)
{
    self->tokens = PyTuple_New(PyTuple_GET_SIZE(tokens));
    for (Py_ssize_t number = 0; self->tokens && number < PyTuple_GET_SIZE(tokens); number++) {
        PyObject *token = PyTuple_GET_ITEM(tokens, number);
        if (!PyUnicode_Check(token) || PyUnicode_READY(token) || PyUnicode_GET_LENGTH(token) == 0) {
            PyErr_SetString(PyExc_TypeError, "an added token must be a string, and not empty");
            return false;
        }
        PyObject *bytes = PyUnicode_AsUTF8String(token);
        if (bytes == NULL)
            return false;
        self->begins_token[(unsigned char)*PyBytes_AS_STRING(bytes)] = true;
        PyTuple_SET_ITEM(self->tokens, number, bytes);
    }
    return self->tokens != NULL;
}

static PyObject *words_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *behind, *before, *tokens, *ends;
    int drops_space;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "no argument may be named");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "UUpO!U", &behind, &before, &drops_space, &PyTuple_Type, &tokens, &ends))
        return NULL;
    Words *self = (Words *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->drops_space = drops_space;
    /* Python hashes strings with a secret of the process. */
    PyObject *secret = PyUnicode_FromString("the secret of a table of words");
    Py_hash_t hash = secret ? PyObject_Hash(secret) : -1;
    Py_XDECREF(secret);
    if (secret && !words_open(&self->table, (uint64_t)hash))
        PyErr_NoMemory();
    if (PyErr_Occurred() || !fill(self->behind, behind) || !fill(self->before, before) || !fill(self->ends, ends)
        || !fill_tokens(self, tokens))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void words_dealloc(Words *self)
{
    PyTypeObject *type = Py_TYPE(self);
    words_close(&self->table);
    Py_XDECREF(self->tokens);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"cut", (PyCFunction)cut, METH_O, NULL},
    {"recall", (PyCFunction)recall, METH_O, NULL},
    {"learn", (PyCFunction)learn, METH_O, NULL},
    {"keep", (PyCFunction)keep, METH_NOARGS, NULL},
    {"forget", (PyCFunction)forget, METH_NOARGS, NULL},
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
    .name = "services.router.native._tokenize.NativeWords",
    .basicsize = sizeof(Words),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static PyMethodDef functions[] = {
    {"open_library", open_library, METH_O, NULL},
    {"extend_chain", (PyCFunction)(void (*)(void))extend_chain, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_tokenize",
    .m_doc = "What is searched for in bodies and texts, and hashes of blocks of tokens, in C.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__tokenize(void)
{
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (made == NULL || type == NULL || PyModule_AddObject(made, "NativeWords", type)) {
        Py_XDECREF(made);
        Py_XDECREF(type);
        return NULL;
    }
    return made;
}
