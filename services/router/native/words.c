#include "words.h"

#include <stdlib.h>
#include <string.h>

enum { SLOTS_AT_FIRST = 1 << 10, RECORDS_AT_FIRST = 1 << 14 };

struct word_slot {
    uint32_t check;  /* Bits of the word's hash that do not choose the slot. */
    uint32_t record; /* Where its record begins, and one more; 0: the slot is free. */
};

struct sizes {
    uint32_t word, tokens;
};

static uint64_t mix(uint64_t one, uint64_t other)
{
    unsigned __int128 product = (unsigned __int128)one * other;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash(const struct word_table *table, struct bytes word)
{
    uint64_t state = table->secret ^ word.size, part = 0;
    const char *at = word.begin;
    size_t left = word.size;
    for (; left > sizeof part; at += sizeof part, left -= sizeof part) {
        memcpy(&part, at, sizeof part);
        state = mix(state ^ part, table->secret | 1);
    }
    part = 0;
    for (size_t shift = 0; shift < left; shift++)
        part |= (uint64_t)(unsigned char)at[shift] << 8 * shift;
    return mix(state ^ part, UINT64_C(0x9e3779b97f4a7c15));
}

bool words_open(struct word_table *table, uint64_t secret)
{
    *table = (struct word_table){.slot_count = SLOTS_AT_FIRST, .room = RECORDS_AT_FIRST, .secret = secret};
    table->slots = calloc(table->slot_count, sizeof *table->slots);
    table->records = malloc(table->room);
    return table->slots && table->records;
}

void words_close(struct word_table *table)
{
    free(table->slots);
    free(table->records);
}

bool words_find(const struct word_table *table, struct bytes word, struct bytes *tokens)
{
    uint64_t hashed = hash(table, word);
    for (size_t at = hashed;; at++) {
        const struct word_slot *slot = &table->slots[at & (table->slot_count - 1)];
        if (slot->record == 0)
            return false;
        if (slot->check != hashed >> 32)
            continue;
        const char *record = table->records + slot->record - 1;
        struct sizes sizes;
        memcpy(&sizes, record, sizeof sizes);
        if (sizes.word != word.size || memcmp(record + sizeof sizes, word.begin, word.size))
            continue;
        *tokens = (struct bytes){record + sizeof sizes + sizes.word, sizes.tokens};
        return true;
    }
}

static void enter(struct word_table *table, struct bytes word, size_t record)
{
    uint64_t hashed = hash(table, word);
    size_t at = hashed & (table->slot_count - 1);
    while (table->slots[at].record)
        at = (at + 1) & (table->slot_count - 1);
    table->slots[at] = (struct word_slot){(uint32_t)(hashed >> 32), (uint32_t)(record + 1)};
    table->count++;
}

static void enter_all(struct word_table *table)
{
    memset(table->slots, 0, table->slot_count * sizeof *table->slots);
    table->count = 0;
    for (size_t at = 0; at < table->size;) {
        struct sizes sizes;
        memcpy(&sizes, table->records + at, sizeof sizes);
        enter(table, (struct bytes){table->records + at + sizeof sizes, sizes.word}, at);
        at += sizeof sizes + sizes.word + sizes.tokens;
    }
}

static bool grow(struct word_table *table)
{
    struct word_slot *slots = malloc(2 * table->slot_count * sizeof *slots);
    if (slots == NULL)
        return false;
    free(table->slots);
    table->slots = slots;
    table->slot_count *= 2;
    enter_all(table);
    return true;
}

bool words_add(struct word_table *table, struct bytes word, struct bytes tokens)
{
    struct sizes sizes = {(uint32_t)word.size, (uint32_t)tokens.size};
    if (word.size > UINT32_MAX / 4 || tokens.size > UINT32_MAX / 4)
        return false;
    size_t size = sizeof sizes + word.size + tokens.size;
    if (table->size + size >= UINT32_MAX || (2 * (table->count + 1) > table->slot_count && !grow(table)))
        return false;
    if (size > table->room - table->size) {
        size_t room = 2 * (table->size + size);
        char *records = realloc(table->records, room);
        if (records == NULL)
            return false;
        table->records = records;
        table->room = room;
    }
    char *record = table->records + table->size;
    memcpy(record, &sizes, sizeof sizes);
    memcpy(record + sizeof sizes, word.begin, word.size);
    memcpy(record + sizeof sizes + word.size, tokens.begin, tokens.size);
    enter(table, word, table->size);
    table->size += size;
    return true;
}

void words_keep(struct word_table *table)
{
    table->kept = table->size;
}

void words_forget(struct word_table *table)
{
    table->size = table->kept;
    enter_all(table);
}
