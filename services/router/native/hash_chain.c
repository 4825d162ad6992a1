/* The chained hashes of a prompt's blocks, by the OpenSSL library that Python's hashlib has loaded: hashlib itself spends
   most of a block's time on Python objects. block_hash.py has the same in Python. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "hash_chain.h"

enum { DIGEST_BYTES = 32, HEAD_BYTES_MAX = 9, HASH_BYTES = 8 };

/* Public functions of OpenSSL 1.1 and later, which needs no headers then. */
static struct {
    void *(*new_context)(void);
    const void *(*sha256)(void);
    int (*init)(void *context, const void *type, void *engine);
    int (*update)(void *context, const void *data, size_t size);
    int (*finish)(void *context, unsigned char *digest, unsigned int *size);
    void *context; /* Used with the GIL held. */
} openssl;

static bool find_function(void *library, const char *name, void *function)
{
    void *found = dlsym(library, name);
    memcpy(function, &found, sizeof found);
    return found != NULL;
}

PyObject *open_library(PyObject *Py_UNUSED(module), PyObject *path)
{
    const char *name = PyUnicode_AsUTF8(path);
    if (name == NULL)
        return NULL;
    /* What a library needs itself is searched, too. */
    void *library = dlopen(name, RTLD_NOW);
    bool found = library && find_function(library, "EVP_MD_CTX_new", &openssl.new_context) &&
                 find_function(library, "EVP_sha256", &openssl.sha256) &&
                 find_function(library, "EVP_DigestInit_ex", &openssl.init) &&
                 find_function(library, "EVP_DigestUpdate", &openssl.update) &&
                 find_function(library, "EVP_DigestFinal_ex", &openssl.finish);
    if (found && openssl.context == NULL) {
        openssl.context = openssl.new_context();
        if (openssl.context == NULL || !openssl.init(openssl.context, openssl.sha256(), NULL))
            found = false;
    }
    if (!found) {
        PyErr_Format(PyExc_ImportError, "no OpenSSL of version 1.1 or later belongs to %s", name);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The size of a token id in CBOR; 0: it is none. */
static size_t token_size(unsigned char head)
{
    static const size_t sizes[] = {2, 3, 5, 9};
    return head < 24 ? 1 : head < 28 ? sizes[head - 24] : 0;
}

/* Where the tokens end that begin at `at`, at most `count`, which becomes their number; NULL: they are no token ids. */
static const unsigned char *tokens_end(const unsigned char *at, const unsigned char *end, size_t *count)
{
    size_t found = 0;
    for (; found < *count && at < end; found++) {
        size_t size = token_size(*at);
        if (size == 0 || size > (size_t)(end - at))
            return NULL;
        at += size;
    }
    *count = found;
    return at;
}

/* Writes the head of an array in canonical CBOR; returns its size. */
static size_t array_head(unsigned char *into, uint64_t length)
{
    if (length < 24) {
        into[0] = (unsigned char)(0x80 | length);
        return 1;
    }
    int power = length < 1 << 8 ? 0 : length < 1 << 16 ? 1 : length < UINT64_C(1) << 32 ? 2 : 3, bytes = 1 << power;
    into[0] = (unsigned char)(0x80 | (24 + power));
    for (int at = 0; at < bytes; at++)
        into[1 + at] = (unsigned char)(length >> 8 * (bytes - 1 - at));
    return 1 + (size_t)bytes;
}

static bool append_hash(PyObject *hashes, const unsigned char *digest)
{
    uint64_t number = 0;
    for (int at = 0; at < HASH_BYTES; at++)
        number = number << 8 | digest[at];
    PyObject *hash = PyLong_FromUnsignedLongLong(number);
    bool ok = hash && !PyList_Append(hashes, hash);
    Py_XDECREF(hash);
    return ok;
}

/* A block's hash covers an array of three: its parent's hash, its tokens, its keys. */
struct block {
    unsigned char begin[3 + DIGEST_BYTES + HEAD_BYTES_MAX];
    size_t begin_size;
    const unsigned char *tokens;
    size_t tokens_size;
    PyObject *keys;
};

static bool hash_block(struct block *block)
{
    unsigned char *parent = block->begin + 3;
    if (openssl.init(openssl.context, NULL, NULL) && openssl.update(openssl.context, block->begin, block->begin_size) &&
        openssl.update(openssl.context, block->tokens, block->tokens_size) &&
        openssl.update(openssl.context, PyBytes_AS_STRING(block->keys), (size_t)PyBytes_GET_SIZE(block->keys)) &&
        openssl.finish(openssl.context, parent, NULL))
        return true;
    PyErr_SetString(PyExc_RuntimeError, "OpenSSL cannot compute SHA-256");
    return false;
}

PyObject *extend_chain(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given)
{
    if (given != 5 || !PyBytes_Check(args[0]) || PyBytes_GET_SIZE(args[0]) != DIGEST_BYTES || !PyBytes_Check(args[1]) ||
        !PyBytes_Check(args[3]) || !PyBytes_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "takes a hash of 32 bytes, tokens, a block size, and keys of two kinds");
        return NULL;
    }
    Py_ssize_t block_size = PyLong_AsSsize_t(args[2]);
    if (block_size < 1 || openssl.context == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, block_size < 1 ? "a block has no tokens" : "no library is open");
        return NULL;
    }
    struct block block = {.begin = {0x83, 0x58, DIGEST_BYTES}, .keys = args[3]};
    unsigned char *digest = block.begin + 3;
    memcpy(digest, PyBytes_AS_STRING(args[0]), DIGEST_BYTES);
    block.begin_size = 3 + DIGEST_BYTES + array_head(digest + DIGEST_BYTES, (uint64_t)block_size);
    const unsigned char *at = (unsigned char *)PyBytes_AS_STRING(args[1]), *end = at + PyBytes_GET_SIZE(args[1]);
    size_t tokens = 0, in_block;
    PyObject *hashes = PyList_New(0);
    while (hashes) {
        in_block = (size_t)block_size;
        block.tokens = at;
        const unsigned char *block_end = tokens_end(at, end, &in_block);
        if (block_end == NULL) {
            PyErr_SetString(PyExc_ValueError, "these bytes are no token ids in CBOR");
            Py_CLEAR(hashes);
            break;
        }
        tokens += in_block;
        if (in_block < (size_t)block_size)
            break;
        block.tokens_size = (size_t)(block_end - at);
        if (!hash_block(&block) || !append_hash(hashes, digest))
            Py_CLEAR(hashes);
        block.keys = args[4];
        at = block_end;
    }
    if (hashes == NULL)
        return NULL;
    return Py_BuildValue("Ny#ny#", hashes, (char *)digest, (Py_ssize_t)DIGEST_BYTES, (Py_ssize_t)tokens, (char *)at,
                         (Py_ssize_t)(end - at));
}
