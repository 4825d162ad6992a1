/* Placement's inner part as a Python type, which works on the fleet table's own arrays; see compiled.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <string.h>

#include "placement.h"

#define NUMBER_MAX (1LL << 53) /* beyond it, floats are no longer exact */

enum { STREAMS = 1, UNSPLITTABLE = 2, HIT_THRESHOLD = 4, MAY_DECODE_FIRST = 8 };

typedef struct {
    PyObject_HEAD
    Py_buffer numbers, flags, groups, free; /* the last one is written */
    struct fleet fleet;
    size_t rows;
    /* Scratch memory, each for all rows. */
    uint8_t *awake, *fit, *sources; /* sources: rows that may be asked for KV */
    int32_t *blocks;
    double *costs_s; /* three times */
    struct holder *ranked;
    size_t *chosen;
    struct candidate *candidates;
} Placing;

/* ---- arguments */

static bool is_count(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given != wanted)
        PyErr_Format(PyExc_TypeError, "takes %zd arguments, got %zd", wanted, given);
    return given == wanted;
}

/* A contiguous array whose items have one of these formats; released by the caller. */
static bool open_array(PyObject *from, Py_buffer *array, const char *formats, int dimensions, int flags)
{
    if (PyObject_GetBuffer(from, array, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags))
        return false;
    if (array->ndim == dimensions && array->format && strlen(array->format) == 1 && strchr(formats, *array->format))
        return true;
    PyErr_Format(PyExc_ValueError, "an array of %d dimensions and format %s, wanted %d and one of %s", array->ndim,
                 array->format ? array->format : "B", dimensions, formats);
    PyBuffer_Release(array);
    return false;
}

static size_t length_of(const Py_buffer *array)
{
    return (size_t)array->shape[array->ndim - 1];
}

/* Integers beyond what a float holds exactly become the largest of these. */
static bool read_integer(PyObject *from, int64_t *number)
{
    int overflow = 0;
    long long value = PyLong_AsLongLongAndOverflow(from, &overflow);
    if (value == -1 && !overflow && PyErr_Occurred())
        return false;
    if (overflow || value > NUMBER_MAX || value < -NUMBER_MAX)
        value = overflow > 0 || (!overflow && value > 0) ? NUMBER_MAX : -NUMBER_MAX;
    *number = value;
    return true;
}

static bool read_double(PyObject *from, double *number)
{
    *number = PyFloat_AsDouble(from);
    return *number != -1.0 || !PyErr_Occurred();
}

/* A row below `count`. */
static bool read_row(PyObject *from, size_t count, size_t *row)
{
    int64_t number;
    if (!read_integer(from, &number))
        return false;
    *row = (size_t)number;
    if (number >= 0 && *row < count)
        return true;
    PyErr_Format(PyExc_ValueError, "there is no row %lld", (long long)number);
    return false;
}

/* The numbers of a request, the first nine arguments of `choose`. */
static bool read_question(PyObject *const *args, struct question *question)
{
    int64_t mode, options;
    if (!read_integer(args[0], &question->tokens) || !read_integer(args[1], &question->tokens_out) ||
        !read_integer(args[2], &question->fetch_tokens_min) || !read_double(args[3], &question->now) ||
        !read_double(args[4], &question->ttft_target_s) || !read_double(args[5], &question->itl_target_s) ||
        !read_double(args[6], &question->tie_s) || !read_integer(args[7], &mode) || !read_integer(args[8], &options))
        return false;
    if (mode < AUTO || mode > DECODE_FIRST) {
        PyErr_Format(PyExc_ValueError, "there is no mode %lld", (long long)mode);
        return false;
    }
    question->mode = (enum mode)mode;
    question->fetch_tokens_min = question->fetch_tokens_min > 1 ? question->fetch_tokens_min : 1;
    question->streams = options & STREAMS;
    question->unsplittable = options & UNSPLITTABLE;
    question->has_hit_threshold = options & HIT_THRESHOLD;
    question->may_decode_first = options & MAY_DECODE_FIRST;
    return true;
}

/* Rows that have enough blocks and may be asked for them. Without branches, which nobody could predict. */
static void find_holders(const Placing *self, double tokens_min, struct holders *holders)
{
    const struct fleet *fleet = &self->fleet;
    const double *block_sizes = fleet->numbers + BLOCK_SIZE * fleet->stride;
    for (size_t row = 0; row < fleet->count; row++) {
        holders->ranked[holders->count] = (struct holder){fleet->groups[row], self->blocks[row], (int64_t)row};
        holders->count += self->sources[row] & ((double)self->blocks[row] * block_sizes[row] >= tokens_min);
    }
}

/* Blocks of the prompt on each row, from `depths` by the index's slots, and the rows that may be asked for them. */
static bool read_depths(Placing *self, PyObject *depths, PyObject *slots, const struct question *question,
                        struct holders *holders)
{
    Py_buffer depth, slot;
    if (!open_array(depths, &depth, "i", 1, 0))
        return false;
    if (!open_array(slots, &slot, "lq", 1, 0)) {
        PyBuffer_Release(&depth);
        return false;
    }
    const int32_t *depth_of = depth.buf;
    const int64_t *slot_of = slot.buf;
    size_t depth_count = length_of(&depth), slot_count = length_of(&slot);
    for (size_t row = 0; row < self->fleet.count; row++) {
        /* A worker that the index does not know has a negative slot. */
        size_t slot_of_row = row < slot_count ? (size_t)slot_of[row] : SIZE_MAX;
        self->blocks[row] = slot_of_row < depth_count ? depth_of[slot_of_row] : 0;
    }
    PyBuffer_Release(&slot);
    PyBuffer_Release(&depth);
    if (!question->unsplittable)
        find_holders(self, (double)question->fetch_tokens_min, holders);
    holders_rank(holders);
    return true;
}

/* The question's arguments, then groups, depths, slots. When it succeeds, the caller releases `groups`, if that has a
 * buffer.
 */
static bool read_request(Placing *self, PyObject *const *args, struct question *question, struct holders *holders,
                         Py_buffer *groups)
{
    groups->obj = NULL;
    if (!read_question(args, question))
        return false;
    self->fleet.groups = self->groups.buf;
    if (args[9] != Py_None) {
        if (!open_array(args[9], groups, "lq", 1, 0))
            return false;
        if (length_of(groups) < self->fleet.count) {
            PyErr_SetString(PyExc_ValueError, "there are fewer groups than rows");
            PyBuffer_Release(groups);
            return false;
        }
        self->fleet.groups = groups->buf;
    }
    question->eviction_price = eviction_price(&self->fleet, self->free.buf);
    question->itl_free_s = question->itl_target_s;
    if (!(question->itl_target_s < INFINITY))
        question->itl_free_s = uncrowded_itl_s(&self->fleet, question, self->free.buf);
    *holders = (struct holders){.ranked = self->ranked, .blocks = self->blocks};
    if (args[10] == Py_None)
        memset(self->blocks, 0, self->fleet.count * sizeof *self->blocks);
    else if (!read_depths(self, args[10], args[11], question, holders)) {
        PyBuffer_Release(groups);
        return false;
    }
    return true;
}

/* ---- methods */

/* Without branches, so that many rows are compared at once. */
FOR_EACH_MACHINE static void find_awake(const struct fleet *fleet, double heard_min, uint8_t *restrict awake)
{
    const uint8_t *ready = fleet->flags + READY * fleet->stride;
    const double *heard_at = fleet->numbers + HEARD_AT * fleet->stride;
    for (size_t row = 0; row < fleet->count; row++)
        awake[row] = ready[row] & (heard_at[row] >= heard_min);
}

FOR_EACH_MACHINE static void find_free(Placing *self, const uint8_t *restrict mask)
{
    const struct fleet *fleet = &self->fleet;
    const uint8_t *serves = fleet->flags + SERVES * fleet->stride;
    const uint8_t *exchanges = fleet->flags + EXCHANGES_KV * fleet->stride;
    const double *legs = fleet->numbers + LEGS * fleet->stride, *legs_max = fleet->numbers + LEGS_MAX * fleet->stride;
    uint8_t *restrict fit = self->fit, *restrict is_free = self->free.buf, *restrict sources = self->sources;
    const uint8_t *restrict awake = self->awake;
    for (size_t row = 0; row < fleet->count; row++) {
        fit[row] = awake[row] & serves[row] & mask[row];
        sources[row] = exchanges[row] & (fit[row] | (awake[row] & !serves[row]));
        is_free[row] = fit[row] & (legs[row] < legs_max[row]);
    }
}

FOR_EACH_MACHINE static long count_of(const uint8_t *rows, size_t count)
{
    long found = 0;
    for (size_t row = 0; row < count; row++)
        found += rows[row];
    return found;
}

static PyObject *fit(Placing *self, PyObject *const *args, Py_ssize_t given)
{
    int64_t count;
    double heard_min;
    Py_buffer mask;
    if (!is_count(given, 4) || !read_integer(args[0], &count) || !read_double(args[3], &heard_min))
        return NULL;
    if (count < 0 || (size_t)count > self->rows)
        return PyErr_Format(PyExc_ValueError, "there are no %lld rows", (long long)count);
    if (!PyTuple_CheckExact(args[2]))
        return PyErr_Format(PyExc_TypeError, "excluded rows are a tuple");
    if (!open_array(args[1], &mask, "?", 1, 0))
        return NULL;
    if (length_of(&mask) < (size_t)count) {
        PyBuffer_Release(&mask);
        return PyErr_Format(PyExc_ValueError, "the mask is too short");
    }
    struct fleet *fleet = &self->fleet;
    fleet->count = (size_t)count;
    find_awake(fleet, heard_min, self->awake);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[2]); i++) {
        size_t row;
        if (!read_row(PyTuple_GET_ITEM(args[2], i), fleet->count, &row)) {
            PyBuffer_Release(&mask);
            return NULL;
        }
        self->awake[row] = false;
    }
    find_free(self, mask.buf);
    PyBuffer_Release(&mask);
    long fit_count = count_of(self->fit, fleet->count);
    return PyLong_FromLong(fit_count ? count_of(self->free.buf, fleet->count) : -1);
}

/* All free rows into `self->chosen`; returns how many. */
static size_t free_rows(Placing *self)
{
    const uint8_t *is_free = self->free.buf;
    size_t count = 0;
    for (size_t row = 0; row < self->fleet.count; row++)
        if (is_free[row])
            self->chosen[count++] = row;
    return count;
}

static PyObject *told_sources(const struct holder *found, int count)
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
    for (int i = 0; chosen && i < count; i++) {
        PyObject *view = PyList_GET_ITEM(views, (Py_ssize_t)self->chosen[i]);
        PyTuple_SET_ITEM(chosen, i, Py_NewRef(view));
    }
    return chosen;
}

/* Takes the parts, of which each may be NULL after an error. */
static PyObject *in_tuple(PyObject **parts, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; i < count; i++) {
        if (parts[i] == NULL)
            Py_CLEAR(tuple);
        if (tuple != NULL)
            PyTuple_SET_ITEM(tuple, i, parts[i]);
        else
            Py_XDECREF(parts[i]);
    }
    return tuple;
}

static PyObject *told(const Placing *self, const struct choice *choice, int count, PyObject *views,
                      const struct holder *found, int found_count)
{
    PyObject *parts[] = {
        PyLong_FromLong(choice->prefill),
        PyLong_FromLong(choice->decode),
        PyLong_FromLong(choice->why),
        PyBool_FromLong(choice->has_pair),
        told_sources(found, found_count),
        PyBytes_FromStringAndSize((const char *)self->candidates, (Py_ssize_t)((size_t)count * sizeof *self->candidates)),
        views_of(self, views, count),
    };
    return in_tuple(parts, sizeof parts / sizeof *parts);
}

static PyObject *choose_among(Placing *self, PyObject *const *args, Py_ssize_t given)
{
    struct question question = {0};
    struct holders holders;
    Py_buffer groups;
    if (!is_count(given, 14))
        return NULL;
    PyObject *views = args[13];
    int is_shortlisted = PyObject_IsTrue(args[12]);
    if (is_shortlisted < 0)
        return NULL;
    if (!PyList_CheckExact(views) || (size_t)PyList_GET_SIZE(views) < self->fleet.count)
        return PyErr_Format(PyExc_ValueError, "views are a list of at least as many as there are rows");
    question.arrays = is_shortlisted;
    if (!read_request(self, args, &question, &holders, &groups))
        return NULL;
    const struct fleet *fleet = &self->fleet;
    int count = (int)(is_shortlisted ? shortlist(fleet, &question, &holders, self->free.buf, self->chosen, self->costs_s) : free_rows(self));
    for (int i = 0; i < count; i++)
        self->candidates[i] = evaluate(fleet, &question, &holders, self->chosen[i]);
    struct choice choice = choose(self->candidates, count, &question);
    struct holder found[SOURCES_MAX];
    int computing = choice.prefill >= 0 ? choice.prefill : choice.decode, found_count = 0;
    if (computing >= 0 && self->candidates[computing].fetched)
        found_count =
            find_sources(fleet, &question, &holders, &self->candidates[computing], self->chosen[computing], found);
    PyObject *result = computing < 0 ? Py_NewRef(Py_None) : told(self, &choice, count, views, found, found_count);
    PyBuffer_Release(&groups);
    return result;
}

/* ---- packed candidates */

/* A named tuple of that type: the integers, and then the floats. */
static PyObject *estimate_of(PyObject *type, const int64_t *integers, int integer_count, const double *floats,
                             int float_count)
{
    PyTypeObject *named = (PyTypeObject *)type;
    if (!PyType_Check(type) || !PyType_IsSubtype(named, &PyTuple_Type))
        return PyErr_Format(PyExc_TypeError, "an estimate's type is a named tuple, not %R", type);
    PyObject *made = named->tp_alloc(named, integer_count + float_count);
    for (int i = 0; made != NULL && i < integer_count + float_count; i++) {
        PyObject *number = i < integer_count ? PyLong_FromLongLong(integers[i]) : PyFloat_FromDouble(floats[i - integer_count]);
        if (number == NULL)
            Py_CLEAR(made);
        else
            PyTuple_SET_ITEM(made, i, number);
    }
    return made;
}

/* What a candidate is made of: roles, group, numbers of the table, estimates. */
static PyObject *unpack(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    size_t number;
    struct candidate one;
    if (!is_count(given, 5))
        return NULL;
    if (!PyBytes_CheckExact(args[0]))
        return PyErr_Format(PyExc_TypeError, "packed candidates are bytes");
    if (!read_row(args[1], (size_t)PyBytes_GET_SIZE(args[0]) / sizeof one, &number))
        return NULL;
    memcpy(&one, PyBytes_AS_STRING(args[0]) + number * sizeof one, sizeof one);
    PyObject *parts[] = {
        PyLong_FromLongLong(one.bits),
        PyLong_FromLongLong(one.group),
        estimate_of((PyObject *)&PyTuple_Type, NULL, 0, &one.legs, 3),
        estimate_of(args[2], &one.cached, 3, &one.queue_s, 4),
        estimate_of(args[3], NULL, 0, &one.handoff_s, 9),
        estimate_of(args[4], NULL, 0, one.cost_s, 3),
    };
    return in_tuple(parts, sizeof parts / sizeof *parts);
}

static PyObject *is_full(Placing *self, PyObject *Py_UNUSED(none))
{
    const uint8_t *is_free = self->free.buf;
    for (size_t row = 0; row < self->fleet.count; row++)
        if (self->fit[row] && !is_free[row])
            Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

/* ---- the type */

static bool open_arrays(Placing *self, PyObject *args)
{
    PyObject *numbers, *flags, *groups, *is_free;
    if (!PyArg_ParseTuple(args, "OOOO", &numbers, &flags, &groups, &is_free) ||
        !open_array(numbers, &self->numbers, "d", 2, 0) || !open_array(flags, &self->flags, "?", 2, 0) ||
        !open_array(groups, &self->groups, "lq", 1, 0) || !open_array(is_free, &self->free, "?", 1, PyBUF_WRITABLE))
        return false;
    self->rows = length_of(&self->groups);
    const Py_buffer *all[] = {&self->numbers, &self->flags, &self->free};
    bool is_right = self->flags.shape[0] == FLAGS && self->numbers.shape[0] == NUMBERS;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        is_right = is_right && length_of(all[i]) == self->rows;
    if (!is_right)
        PyErr_SetString(PyExc_ValueError, "the arrays do not have the fleet table's shape");
    return is_right;
}

static bool take_memory(Placing *self)
{
    self->awake = PyMem_Calloc(self->rows, sizeof *self->awake);
    self->fit = PyMem_Calloc(self->rows, sizeof *self->fit);
    self->sources = PyMem_Calloc(self->rows, sizeof *self->sources);
    self->blocks = PyMem_Calloc(self->rows, sizeof *self->blocks);
    self->costs_s = PyMem_Calloc(self->rows, 3 * sizeof *self->costs_s);
    self->ranked = PyMem_Calloc(self->rows, sizeof *self->ranked);
    self->chosen = PyMem_Calloc(self->rows, sizeof *self->chosen);
    self->candidates = PyMem_Calloc(self->rows, sizeof *self->candidates);
    bool is_taken = self->awake && self->fit && self->sources && self->blocks && self->costs_s && self->ranked &&
                    self->chosen && self->candidates;
    if (!is_taken)
        PyErr_NoMemory();
    return is_taken;
}

static PyObject *placing_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    Placing *self = (Placing *)type->tp_alloc(type, 0);
    if (self != NULL && (!open_arrays(self, args) || !take_memory(self)))
        Py_CLEAR(self);
    if (self != NULL)
        self->fleet = (struct fleet){self->numbers.buf, self->flags.buf, self->groups.buf, self->rows, 0};
    return (PyObject *)self;
}

static void placing_dealloc(Placing *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_buffer *arrays[] = {&self->numbers, &self->flags, &self->groups, &self->free};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        PyBuffer_Release(arrays[i]);
    void *memory[] = {self->awake,   self->fit,    self->sources, self->blocks,
                      self->costs_s, self->ranked, self->chosen,  self->candidates};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
        PyMem_Free(memory[i]);
    type->tp_free(self);
    Py_DECREF(type);
}

#define FAST(name, function) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST("fit", fit),
    FAST("choose", choose_among),
    {"is_full", (PyCFunction)is_full, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Candidates and the choice among them; see compiled.py."},
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

static PyObject *columns_read(Columns *self, PyObject *given)
{
    size_t row, rows = length_of(&self->numbers), count = (size_t)self->numbers.shape[0];
    if (!read_row(given, rows, &row))
        return NULL;
    const double *from = (double *)self->numbers.buf + row;
    PyObject *values = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; values && i < count; i++) {
        PyObject *value = PyFloat_FromDouble(from[i * rows]);
        if (value == NULL)
            Py_CLEAR(values);
        else
            PyList_SET_ITEM(values, (Py_ssize_t)i, value);
    }
    return values;
}

static PyObject *columns_write(Columns *self, PyObject *const *args, Py_ssize_t given)
{
    size_t row, first, rows = length_of(&self->numbers), count = (size_t)self->numbers.shape[0];
    if (given < 2)
        return PyErr_Format(PyExc_TypeError, "takes at least 2 arguments, got %zd", given);
    if (!read_row(args[0], rows, &row) || !read_row(args[1], count, &first))
        return NULL;
    if ((size_t)given - 2 > count - first)
        return PyErr_Format(PyExc_ValueError, "there are no %zd numbers from %zu on", given - 2, first);
    double *to = (double *)self->numbers.buf + first * rows + row;
    for (Py_ssize_t i = 2; i < given; i++, to += rows) {
        double value;
        if (!read_double(args[i], &value))
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
    if (self != NULL && !open_array(numbers, &self->numbers, "d", 2, PyBUF_WRITABLE))
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
    FAST("write", columns_write),
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

static PyMethodDef functions[] = {
    FAST("unpack", unpack),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_placement",
    .m_doc = "Placement in C.",
    .m_size = -1,
    .m_methods = functions,
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
