/* The block table as a Python type. Hashes come packed (bytes, big-endian) or as a sequence of integers. */
#include "arguments.h"

#include <stdlib.h>

static PyObject *change(Table *self, PyObject *const *args, Py_ssize_t given,
                        void (*how)(struct block_table *, uint32_t, int, const uint64_t *, size_t))
{
    long row, tier;
    if (!is_count(given, 3) || !read_number(args[0], 0, ROWS_MAX, "row", &row) ||
        !read_number(args[1], 0, TIERS, "tier", &tier))
        return NULL;
    Py_ssize_t count = read_hashes(self, args[2]);
    if (count < 0)
        return NULL;
    how(&self->table, (uint32_t)row, (int)tier, self->scratch, (size_t)count);
    Py_RETURN_NONE;
}

static PyObject *store(Table *self, PyObject *const *args, Py_ssize_t given)
{
    return change(self, args, given, table_store);
}

static PyObject *take(Table *self, PyObject *const *args, Py_ssize_t given)
{
    return change(self, args, given, table_remove);
}

static PyObject *expect(Table *self, PyObject *const *args, Py_ssize_t given)
{
    long tier;
    if (!is_count(given, 2) || !read_number(args[0], 0, TIERS, "tier", &tier))
        return NULL;
    Py_ssize_t count = read_hashes(self, args[1]);
    if (count < 0)
        return NULL;
    for (Py_ssize_t at = 0; at < count && at < EXPECTED_MAX; at++)
        map_prefetch(&self->table.maps[tier], self->scratch[at]);
    Py_RETURN_NONE;
}

static PyObject *clear(Table *self, PyObject *arg)
{
    long row;
    if (!read_number(arg, 0, ROWS_MAX, "row", &row))
        return NULL;
    table_clear(&self->table, (uint32_t)row);
    Py_RETURN_NONE;
}

static PyObject *count(Table *self, PyObject *arg)
{
    long row;
    if (!read_number(arg, 0, ROWS_MAX, "row", &row))
        return NULL;
    const struct life *life = table_life(&self->table, (uint32_t)row);
    uint64_t sum = 0;
    for (int tier = 0; life && tier < TIERS; tier++)
        sum += life->counts[tier];
    return PyLong_FromUnsignedLongLong(sum);
}

/* TIER_ROTATIONS of shared/contracts/kv_events.py */
static const int turns[TIERS] = {0, 21, 42, 11, 63};

static PyObject *xor(Table *self, PyObject *arg)
{
    long row;
    if (!read_number(arg, 0, ROWS_MAX, "row", &row))
        return NULL;
    const struct life *life = table_life(&self->table, (uint32_t)row);
    uint64_t joined = life ? life->xors[0] : 0;
    for (int tier = 1; life && tier < TIERS; tier++) {
        joined ^= life->xors[tier] << turns[tier] | life->xors[tier] >> (64 - turns[tier]);
    }
    return PyLong_FromUnsignedLongLong(joined);
}

static PyObject *evictions(Table *self, PyObject *arg)
{
    long row;
    if (!read_number(arg, 0, ROWS_MAX, "row", &row))
        return NULL;
    const struct life *life = table_life(&self->table, (uint32_t)row);
    return Py_BuildValue("KK", life ? life->evicted : 0ull, life ? life->restored : 0ull);
}

static PyObject *blocks(Table *self, PyObject *const *args, Py_ssize_t given)
{
    long row, tier;
    if (!is_count(given, 2) || !read_number(args[0], 0, ROWS_MAX, "row", &row) ||
        !read_number(args[1], 0, TIERS, "tier", &tier))
        return NULL;
    const struct life *life = table_life(&self->table, (uint32_t)row);
    uint64_t held = life ? life->counts[tier] : 0;
    PyObject *packed = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(held * 8));
    if (packed == NULL)
        return NULL;
    uint64_t *into = room_for(self, (Py_ssize_t)held);
    table_blocks(&self->table, (uint32_t)row, (int)tier, into);
    for (uint64_t i = 0; i < held; i++)
        into[i] = __builtin_bswap64(into[i]);
    memcpy(PyBytes_AS_STRING(packed), into, held * 8);
    return packed;
}

static PyObject *held(Table *self, PyObject *arg)
{
    uint64_t block = PyLong_AsUnsignedLongLong(arg);
    if (block == UINT64_MAX && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(table_held(&self->table, block));
}

static PyObject *depths(Table *self, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer out;
    if (!is_count(given, 2) || !open_array(args[1], &out, sizeof(int32_t), PyBUF_WRITABLE))
        return NULL;
    Py_ssize_t count = read_hashes(self, args[0]);
    if (count >= 0)
        table_depths(&self->table, self->scratch, (size_t)count, out.buf, (uint32_t)(out.len / out.itemsize));
    PyBuffer_Release(&out);
    if (count < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *boundaries(Table *self, PyObject *const *args, Py_ssize_t given)
{
    Py_buffer out;
    Py_ssize_t stride, step, window, window_blocks, full_beyond, window_beyond, short_by;
    int is_narrow;
    if (!is_count(given, 3) || !PyArg_ParseTuple(args[1], "nnnnnnpn", &stride, &step, &window, &window_blocks,
                                                 &full_beyond, &window_beyond, &is_narrow, &short_by))
        return NULL;
    if (stride < 0 || step < 1 || window < 1 || window_blocks < 1 || full_beyond < 0 || window_beyond < 0 ||
        short_by < 0)
        return PyErr_Format(PyExc_ValueError, "boundaries at %R", args[1]);
    if (!open_array(args[2], &out, sizeof(int32_t), PyBUF_WRITABLE))
        return NULL;
    Py_ssize_t count = read_hashes(self, args[0]);
    if (count >= 0) {
        /* More than there are hashes is as much as one more. */
        size_t most = (size_t)count + 1;
#define CAPPED(number) ((size_t)(number) < most ? (size_t)(number) : most)
        struct boundaries at = {CAPPED(stride), CAPPED(step), CAPPED(window), CAPPED(window_blocks),
                                CAPPED(full_beyond), CAPPED(window_beyond), is_narrow, CAPPED(short_by)};
#undef CAPPED
        table_boundaries(&self->table, self->scratch, (size_t)count, &at, out.buf, (uint32_t)(out.len / out.itemsize));
    }
    PyBuffer_Release(&out);
    if (count < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *cover(Table *self, PyObject *const *args, Py_ssize_t given)
{
    long first, end;
    Py_buffer allowed;
    if (!is_count(given, 4) || !read_number(args[1], 0, LONG_MAX, "first", &first) ||
        !read_number(args[2], 0, LONG_MAX, "end", &end))
        return NULL;
    if (!open_array(args[3], &allowed, 1, 0))
        return NULL;
    PyObject *list = NULL;
    Py_ssize_t count = read_hashes(self, args[0]);
    if (count >= 0) {
        end = end < count ? end : count;
        size_t room = end > first ? (size_t)(end - first) : 0, found = 0;
        struct source *sources = must(malloc((room + 1) * sizeof *sources));
        found = table_cover(&self->table, self->scratch, (size_t)first, (size_t)end, allowed.buf, (uint32_t)allowed.len,
                            sources);
        list = PyList_New(0);
        for (size_t i = 0; list && i < found; i++) {
            PyObject *one = Py_BuildValue("IKK", sources[i].row, sources[i].first, sources[i].end);
            if (one == NULL || PyList_Append(list, one))
                Py_CLEAR(list);
            Py_XDECREF(one);
        }
        free(sources);
    }
    PyBuffer_Release(&allowed);
    return list;
}

static PyObject *size(Table *self, PyObject *Py_UNUSED(none))
{
    table_sweep_all(&self->table);
    uint64_t sum = 0;
    for (int tier = 0; tier < TIERS; tier++)
        sum += self->table.maps[tier].block_count;
    return PyLong_FromUnsignedLongLong(sum);
}

static PyObject *bytes_used(Table *self, PyObject *Py_UNUSED(none))
{
    return PyLong_FromUnsignedLongLong(table_bytes(&self->table));
}

static PyObject *table_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Table *self = (Table *)type->tp_alloc(type, 0);
    if (self != NULL)
        table_open(&self->table);
    return (PyObject *)self;
}

static void table_dealloc(Table *self)
{
    PyTypeObject *type = Py_TYPE(self);
    table_close(&self->table);
    free(self->scratch);
    type->tp_free(self);
    Py_DECREF(type);
}

#define FAST(name, function) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST("store", store),
    FAST("remove", take),
    FAST("expect", expect),
    {"clear", (PyCFunction)clear, METH_O, NULL},
    {"count", (PyCFunction)count, METH_O, NULL},
    {"xor", (PyCFunction)xor, METH_O, NULL},
    {"evictions", (PyCFunction)evictions, METH_O, NULL},
    FAST("blocks", blocks),
    {"held", (PyCFunction)held, METH_O, NULL},
    FAST("depths", depths),
    FAST("boundaries", boundaries),
    FAST("cover", cover),
    {"size", (PyCFunction)size, METH_NOARGS, NULL},
    {"bytes_used", (PyCFunction)bytes_used, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "Which row holds which block; see block_table.py."},
    {Py_tp_new, table_new},
    {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "services.router.native._block_table.NativeBlockTable",
    .basicsize = sizeof(Table),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_block_table",
    .m_doc = "The block table in C.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__block_table(void)
{
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (made == NULL || type == NULL || PyModule_AddObject(made, "NativeBlockTable", type)) {
        Py_XDECREF(made);
        Py_XDECREF(type);
        return NULL;
    }
    return made;
}
