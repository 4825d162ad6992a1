/* Words and their tokens, in a table that is filled and searched without Python objects. */
#ifndef BATON_WORDS_H
#define BATON_WORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct word_table {
    struct word_slot *slots; /* A power of two of them, at most half of them used. */
    size_t slot_count, count;
    char *records; /* Each word behind its length and that of its tokens, then the tokens. */
    size_t size, room, kept;
    uint64_t secret; /* Nobody can choose words that are all stored in the same slot. */
};

struct bytes {
    const char *begin;
    size_t size;
};

/* False: there is no memory. */
bool words_open(struct word_table *table, uint64_t secret);
void words_close(struct word_table *table);
/* Whether the word was found. */
bool words_find(const struct word_table *table, struct bytes word, struct bytes *tokens);
/* Adds a word that is not in the table. False: there is no memory, or the table is full. */
bool words_add(struct word_table *table, struct bytes word, struct bytes tokens);
/* Words that were added so far stay. */
void words_keep(struct word_table *table);
/* Removes all words but those that stay. */
void words_forget(struct word_table *table);

#endif
