/* Placement in C as a Python type, which works on the fleet table's own arrays; see native.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "placement.h"

typedef struct {
    PyObject_HEAD
    Py_buffer numbers, flags, groups, sources; /* the last one is written */
    struct fleet fleet;
    size_t rows;
    uint8_t *all;    /* a mask of all rows */
    int32_t *unused; /* zeros */
    struct candidate *candidates;
} Placing;

/* A contiguous array whose items have one of these formats, with `length` or more in each row; released by the caller. */
static bool open_array(PyObject *from, Py_buffer *array, const char *formats, int dimensions, size_t length, int flags)
{
    if (PyObject_GetBuffer(from, array, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags))
        return false;
    if (array->ndim == dimensions && array->format && strlen(array->format) == 1 && strchr(formats, *array->format) &&
        (size_t)array->shape[dimensions - 1] >= length)
        return true;
    PyErr_Format(PyExc_ValueError, "not an array of %d dimensions, one of the formats %s, and at least %zu columns",
                 dimensions, formats, length);
    PyBuffer_Release(array);
    return false;
}

/* An optional mask: all rows where it is None. The caller releases `array`. */
static bool open_mask(const Placing *self, PyObject *from, Py_buffer *array, const uint8_t **mask)
{
    *mask = self->all;
    array->obj = NULL;
    if (from == Py_None)
        return true;
    if (!open_array(from, array, "?", 1, self->fleet.count, 0))
        return false;
    *mask = array->buf;
    return true;
}

/* ---- methods */

static PyObject *fit(Placing *self, PyObject *args)
{
    enum { MASKS = 4 };
    Py_ssize_t count;
    PyObject *given[MASKS];
    Py_buffer arrays[MASKS] = {0};
    double heard_min;
    if (!PyArg_ParseTuple(args, "nOOOOd", &count, &given[0], &given[1], &given[2], &given[3], &heard_min))
        return NULL;
    if (count < 0 || (size_t)count > self->rows)
        return PyErr_Format(PyExc_ValueError, "there are no %zd rows", count);
    self->fleet.count = (size_t)count;
    struct masks masks = {.prefill_named = given[2] != Py_None, .answer_named = given[3] != Py_None};
    const uint8_t **into[MASKS] = {&masks.offering, &masks.allowed, &masks.may_prefill, &masks.may_answer};
    bool is_right = true;
    for (int i = 0; i < MASKS && is_right; i++)
        is_right = open_mask(self, given[i], &arrays[i], into[i]);
    PyObject *result = is_right ? PyLong_FromLong(find_rows(&self->fleet, &masks, heard_min)) : NULL;
    for (int i = 0; i < MASKS; i++)
        PyBuffer_Release(&arrays[i]);
    return result;
}

/* Blocks of the prompt on each row, from `depths` by the index's slots. */
static bool read_depths(Placing *self, PyObject *depths, PyObject *slots)
{
    Py_buffer depth, slot;
    if (!open_array(depths, &depth, "i", 1, 0, 0))
        return false;
    if (!open_array(slots, &slot, "lq", 1, 0, 0)) {
        PyBuffer_Release(&depth);
        return false;
    }
    const int32_t *depth_of = depth.buf;
    const int64_t *slot_of = slot.buf;
    size_t depth_count = (size_t)depth.shape[0], slot_count = (size_t)slot.shape[0];
    for (size_t row = 0; row < self->fleet.count; row++) {
        /* A worker that the index does not know has a negative slot. */
        size_t slot_of_row = row < slot_count ? (size_t)slot_of[row] : SIZE_MAX;
        self->fleet.blocks[row] = slot_of_row < depth_count ? depth_of[slot_of_row] : 0;
    }
    PyBuffer_Release(&slot);
    PyBuffer_Release(&depth);
    return true;
}

static PyObject *sources_of(const struct holder *found, int count)
{
    PyObject *sources = PyTuple_New(count);
    for (int i = 0; sources && i < count; i++) {
        PyObject *one = Py_BuildValue("LL", (long long)found[i].row, (long long)found[i].blocks);
        if (one == NULL)
            Py_CLEAR(sources);
        else
            PyTuple_SET_ITEM(sources, i, one);
    }
    return sources;
}

static PyObject *views_of(const Placing *self, PyObject *views, int count)
{
    PyObject *chosen = PyTuple_New(count);
    for (int i = 0; chosen && i < count; i++)
        PyTuple_SET_ITEM(chosen, i, Py_NewRef(PyList_GET_ITEM(views, (Py_ssize_t)self->fleet.chosen[i])));
    return chosen;
}

static PyObject *choice_among(Placing *self, const struct question *question, PyObject *views)
{
    struct fleet *fleet = &self->fleet;
    const struct candidate *all = self->candidates;
    int count = find_candidates(fleet, question, self->candidates), found_count = 0;
    struct choice choice = choose(all, count, question);
    int computing = choice.prefill >= 0 ? choice.prefill : choice.decode;
    if (computing < 0) {
        uint8_t roles = 0;
        for (size_t row = 0; row < fleet->count; row++)
            roles |= fleet->roles[row];
        return PyBool_FromLong(roles & FULL);
    }
    struct holder found[SOURCES_MAX];
    if (all[computing].of.fetched > 0)
        found_count = find_sources(fleet, question, &all[computing], fleet->chosen[computing], found);
    return Py_BuildValue("iiiNNy#N", choice.prefill, choice.decode, choice.why, PyBool_FromLong(choice.has_pair),
                         sources_of(found, found_count), all, (Py_ssize_t)((size_t)count * sizeof *all),
                         views_of(self, views, count));
}

static PyObject *choose_among(Placing *self, PyObject *args)
{
    struct question asked = {0};
    PyObject *groups, *depths, *slots, *in_use, *views;
    Py_buffer of_model = {0}, used = {0};
    long long tokens, tokens_out, fetch_tokens_min;
    if (!PyArg_ParseTuple(args, "(LLLdddddii)OOOOO!", &tokens, &tokens_out, &fetch_tokens_min, &asked.now,
                          &asked.ttft_target_s, &asked.itl_target_s, &asked.tie_s, &asked.decode_first_share_min,
                          &asked.mode, &asked.options, &groups, &depths, &slots, &in_use, &PyList_Type, &views))
        return NULL;
    asked.tokens = tokens;
    asked.tokens_out = tokens_out;
    asked.fetch_tokens_min = fetch_tokens_min;
    struct fleet *fleet = &self->fleet;
    if ((size_t)PyList_GET_SIZE(views) < fleet->count)
        return PyErr_Format(PyExc_ValueError, "there are fewer views than rows");
    if (!open_array(groups, &of_model, "lq", 1, fleet->count, 0))
        return NULL;
    if (in_use != Py_None && !open_array(in_use, &used, "i", 1, fleet->count, 0)) {
        PyBuffer_Release(&of_model);
        return NULL;
    }
    fleet->groups = of_model.buf;
    fleet->in_use = in_use == Py_None ? self->unused : used.buf;
    fleet->holder_count = 0;
    bool is_right = true;
    if (depths == Py_None)
        memset(fleet->blocks, 0, fleet->count * sizeof *fleet->blocks);
    else if ((is_right = read_depths(self, depths, slots)))
        find_holders(fleet, &asked);
    PyObject *result = NULL;
    if (is_right && in_use == Py_None && lacks_room(fleet, &asked))
        result = Py_NewRef(Py_None);
    else if (is_right)
        result = choice_among(self, &asked, views);
    PyBuffer_Release(&used);
    PyBuffer_Release(&of_model);
    return result;
}

/* ---- the type */

static bool open_table(Placing *self, PyObject *args)
{
    PyObject *numbers, *flags, *sources;
    if (!PyArg_ParseTuple(args, "OOO", &numbers, &flags, &sources) ||
        !open_array(sources, &self->sources, "?", 1, 0, PyBUF_WRITABLE))
        return false;
    self->rows = (size_t)self->sources.shape[0];
    if (!open_array(numbers, &self->numbers, "d", 2, self->rows, 0) ||
        !open_array(flags, &self->flags, "?", 2, self->rows, 0))
        return false;
    if (self->numbers.shape[0] == NUMBERS && self->flags.shape[0] == FLAGS &&
        (size_t)self->numbers.shape[1] == self->rows && (size_t)self->flags.shape[1] == self->rows)
        return true;
    PyErr_SetString(PyExc_ValueError, "the arrays do not have the fleet table's shape");
    return false;
}

static bool take_memory(Placing *self)
{
    struct fleet *fleet = &self->fleet;
    *fleet = (struct fleet){
        .numbers = self->numbers.buf,
        .flags = self->flags.buf,
        .stride = self->rows,
        .sources = self->sources.buf,
        .roles = PyMem_Calloc(self->rows, sizeof *fleet->roles),
        .blocks = PyMem_Calloc(self->rows, sizeof *fleet->blocks),
        .holders = PyMem_Calloc(self->rows, sizeof *fleet->holders),
        .costs_s = PyMem_Calloc(self->rows, 4 * sizeof *fleet->costs_s),
        .chosen = PyMem_Calloc(self->rows, sizeof *fleet->chosen),
    };
    self->candidates = PyMem_Calloc(self->rows, sizeof *self->candidates);
    self->all = PyMem_Calloc(self->rows, sizeof *self->all);
    self->unused = PyMem_Calloc(self->rows, sizeof *self->unused);
    if (!fleet->roles || !fleet->blocks || !fleet->holders || !fleet->costs_s || !fleet->chosen || !self->candidates ||
        !self->all || !self->unused) {
        PyErr_NoMemory();
        return false;
    }
    memset(self->all, 1, self->rows);
    return true;
}

static PyObject *placing_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    Placing *self = (Placing *)type->tp_alloc(type, 0);
    if (self != NULL && (!open_table(self, args) || !take_memory(self)))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void placing_dealloc(Placing *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&self->numbers);
    PyBuffer_Release(&self->flags);
    PyBuffer_Release(&self->sources);
    void *memory[] = {self->fleet.roles,   self->fleet.blocks, self->fleet.holders, self->fleet.costs_s,
                      self->fleet.chosen, self->candidates,   self->all,          self->unused};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        PyMem_Free(memory[i]);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"fit", (PyCFunction)fit, METH_VARARGS, NULL},
    {"choose", (PyCFunction)choose_among, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Candidates and the choice among them; see specification.py."},
    {Py_tp_new, placing_new},
    {Py_tp_dealloc, placing_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "services.router.native._placement.NativePlacement",
    .basicsize = sizeof(Placing),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

/* ---- single numbers of the table */

typedef struct {
    PyObject_HEAD
    Py_buffer numbers;
} Columns;

/* An index below `count`. */
static bool read_index(PyObject *from, Py_ssize_t count, Py_ssize_t *index)
{
    *index = PyLong_AsSsize_t(from);
    if (*index >= 0 && *index < count)
        return true;
    if (!PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "there is no row %zd", *index);
    return false;
}

static PyObject *columns_read(Columns *self, PyObject *given)
{
    Py_ssize_t row, count = self->numbers.shape[0], rows = self->numbers.shape[1];
    if (!read_index(given, rows, &row))
        return NULL;
    const double *from = (double *)self->numbers.buf + row;
    PyObject *values = PyList_New(count);
    for (Py_ssize_t i = 0; values && i < count; i++) {
        PyObject *value = PyFloat_FromDouble(from[i * rows]);
        if (value == NULL)
            Py_CLEAR(values);
        else
            PyList_SET_ITEM(values, i, value);
    }
    return values;
}

static PyObject *columns_write(Columns *self, PyObject *const *args, Py_ssize_t given)
{
    Py_ssize_t row, first, count = self->numbers.shape[0], rows = self->numbers.shape[1];
    if (given < 2)
        return PyErr_Format(PyExc_TypeError, "takes at least 2 arguments, got %zd", given);
    if (!read_index(args[0], rows, &row) || !read_index(args[1], count, &first))
        return NULL;
    if (given - 2 > count - first)
        return PyErr_Format(PyExc_ValueError, "there are no %zd numbers from %zd on", given - 2, first);
    double *to = (double *)self->numbers.buf + first * rows + row;
    for (Py_ssize_t i = 2; i < given; i++, to += rows) {
        double value = PyFloat_AsDouble(args[i]);
        if (value == -1.0 && PyErr_Occurred())
            return NULL;
        *to = value;
    }
    Py_RETURN_NONE;
}

static PyObject *columns_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *numbers;
    if (!PyArg_ParseTuple(args, "O", &numbers))
        return NULL;
    Columns *self = (Columns *)type->tp_alloc(type, 0);
    if (self != NULL && !open_array(numbers, &self->numbers, "d", 2, 0, PyBUF_WRITABLE))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void columns_dealloc(Columns *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&self->numbers);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef columns_methods[] = {
    {"read", (PyCFunction)columns_read, METH_O, NULL},
    {"write", (PyCFunction)(void (*)(void))columns_write, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot columns_slots[] = {
    {Py_tp_doc, "Reads and writes single numbers of the fleet table; see fleet_table.py."},
    {Py_tp_new, columns_new},
    {Py_tp_dealloc, columns_dealloc},
    {Py_tp_methods, columns_methods},
    {0, NULL},
};

static PyType_Spec columns_spec = {
    .name = "services.router.native._placement.Columns",
    .basicsize = sizeof(Columns),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = columns_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_placement",
    .m_doc = "Placement in C.",
    .m_size = -1,
};

#define AS_STRING(name) #name " "

PyMODINIT_FUNC PyInit__placement(void)
{
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec), *columns = PyType_FromSpec(&columns_spec);
    if (made == NULL || type == NULL || columns == NULL || PyModule_AddObjectRef(made, "Columns", columns) ||
        PyModule_AddStringConstant(made, "NUMBERS", NUMBER_NAMES(AS_STRING)) ||
        PyModule_AddStringConstant(made, "FLAGS", FLAG_NAMES(AS_STRING)) ||
        PyModule_AddIntConstant(made, "CANDIDATE_BYTES", sizeof(struct candidate)) ||
        PyModule_AddObjectRef(made, "NativePlacement", type))
        Py_CLEAR(made);
    Py_XDECREF(type);
    Py_XDECREF(columns);
    return made;
}
