/* The cheapest workers of a large fleet, for which the costs of all are estimated. See shortlist.py. */
#include <math.h>

#include "cost.h"

enum { PASSED_OVER = 16 }; /* rows that are passed over together, if none of them is cheap */

/* Rows behind each other that have the same group and block size, and may all fetch KV, or none. */
struct run {
    size_t first, end;
    struct prefix prefix; /* of the first row; the others differ in `held` */
};

/* Whether the rows from `first` to before `end` may be in the run of a row. */
FOR_EACH_MACHINE static bool are_alike(const struct fleet *fleet, size_t of_row, size_t first, size_t end)
{
    const double *block_sizes = fleet->numbers + BLOCK_SIZE * fleet->stride;
    const uint8_t *exchanges = fleet->flags + EXCHANGES_KV * fleet->stride;
    int64_t others = 0;
    uint8_t others_exchange = 0;
    for (size_t row = first; row < end; row++)
        others += (block_sizes[row] != block_sizes[of_row]) | (fleet->groups[row] != fleet->groups[of_row]);
    for (size_t row = first; row < end; row++)
        others_exchange |= exchanges[row] ^ exchanges[of_row];
    return !others && !others_exchange;
}

static struct run run_from(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                           size_t first)
{
    size_t end = first + 1;
    while (end + TOGETHER < fleet->count && are_alike(fleet, first, end, end + TOGETHER))
        end += TOGETHER;
    while (end < fleet->count && are_alike(fleet, first, end, end + 1))
        end++;
    return (struct run){first, end, prefix_of(fleet, question, holders, first)};
}

/* The costs of a run's rows, of which those that miss a target come after all that meet them. */
FOR_EACH_MACHINE static void estimate_run(const struct fleet *table, const struct question *asked,
                                          const int32_t *restrict blocks, const struct run *rows,
                                          double *restrict prefill_s, double *restrict decode_s,
                                          double *restrict whole_s)
{
    struct fleet copied = *table, *fleet = &copied;
    struct question question = *asked;
    struct run run = *rows;
    question.arrays = true;
    for (size_t row = run.first; row < run.end; row++) {
        run.prefix.held = (double)blocks[row];
        struct estimate of = estimate(fleet, &question, row, run.prefix);
        double late_s = ttft_s(of.queue_s, of.fetch_s, of.prefill_s) > question.ttft_target_s ? NEVER_S : 0.0;
        double slow_s = of.step_s > question.itl_target_s ? NEVER_S : 0.0;
        prefill_s[row] = of.cost_s[PREFILL] + late_s;
        decode_s[row] = of.cost_s[DECODE] + slow_s;
        whole_s[row] = of.cost_s[WHOLE] + late_s + slow_s;
    }
}

FOR_EACH_MACHINE static double least_of_some(const double *costs_s)
{
    return least_of(costs_s, PASSED_OVER);
}

/* The cheapest rows so far, in order; among equals the first. */
struct few {
    int count;
    size_t rows[SHORTLISTED];
    double costs_s[SHORTLISTED];
};

/* Costs that are not numbers come last, as numpy sorts them. */
static bool is_cheaper(double one_s, double other_s)
{
    return one_s < other_s || (isnan(other_s) && !isnan(one_s));
}

static bool few_takes(const struct few *few, double cost_s)
{
    return few->count < SHORTLISTED || is_cheaper(cost_s, few->costs_s[SHORTLISTED - 1]);
}

static void few_add(struct few *few, size_t row, double cost_s)
{
    if (!few_takes(few, cost_s))
        return;
    int at = few->count < SHORTLISTED ? few->count++ : SHORTLISTED - 1;
    for (; at > 0 && is_cheaper(cost_s, few->costs_s[at - 1]); at--) {
        few->rows[at] = few->rows[at - 1];
        few->costs_s[at] = few->costs_s[at - 1];
    }
    few->rows[at] = row;
    few->costs_s[at] = cost_s;
}

/* Of one group. */
struct lists {
    struct few prefill, decode, decodes_whole, whole;
};

static size_t append(const struct few *few, size_t *chosen, size_t begin, size_t count)
{
    for (int i = 0; i < few->count; i++) {
        size_t at = begin;
        while (at < count && chosen[at] != few->rows[i])
            at++;
        if (at == count)
            chosen[count++] = few->rows[i];
    }
    return count;
}

/* The smallest group of a free row that is at least `least`; INT64_MAX: there is none. */
static int64_t group_from(const struct fleet *fleet, const uint8_t *is_free, int64_t least)
{
    int64_t found = INT64_MAX;
    for (size_t row = 0; row < fleet->count; row++) {
        int64_t group = is_free[row] ? fleet->groups[row] : INT64_MAX;
        found = group >= least && group < found ? group : found;
    }
    return found;
}

/* The cheapest free rows of a group. */
static struct lists list_group(const struct fleet *fleet, const uint8_t *is_free, int64_t group,
                               const double *prefill_s, const double *decode_s, const double *whole_s)
{
    struct lists lists = {0};
    for (size_t row = 0; row < fleet->count; row++) {
        if (row % PASSED_OVER == 0 && row + PASSED_OVER <= fleet->count) {
            double least_s = least_of_some(whole_s + row);
            if (!few_takes(&lists.prefill, least_of_some(prefill_s + row)) &&
                !few_takes(&lists.decode, least_of_some(decode_s + row)) &&
                !few_takes(&lists.decodes_whole, least_s) && !few_takes(&lists.whole, least_s)) {
                row += PASSED_OVER - 1;
                continue;
            }
        }
        if (!is_free[row] || fleet->groups[row] != group)
            continue;
        if (flag(fleet, PREFILLS, row))
            few_add(&lists.prefill, row, prefill_s[row]);
        if (flag(fleet, DECODES, row)) {
            few_add(&lists.decode, row, decode_s[row]);
            few_add(&lists.decodes_whole, row, whole_s[row]);
        }
        few_add(&lists.whole, row, whole_s[row]);
    }
    return lists;
}

size_t shortlist(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                 const uint8_t *is_free, size_t *chosen, double *costs_s)
{
    double *prefill_s = costs_s, *decode_s = prefill_s + fleet->count, *whole_s = decode_s + fleet->count;
    struct run run = {0};
    for (size_t row = 0; row < fleet->count; row = run.end) {
        run = run_from(fleet, question, holders, row);
        estimate_run(fleet, question, holders->blocks, &run, prefill_s, decode_s, whole_s);
    }
    size_t count = 0;
    bool is_one_run = run.first == 0 && run.end; /* Mostly; then there is one group, too. */
    int64_t group = is_one_run ? fleet->groups[0] : group_from(fleet, is_free, INT64_MIN);
    for (; group < INT64_MAX; group = is_one_run ? INT64_MAX : group_from(fleet, is_free, group + 1)) {
        struct lists lists = list_group(fleet, is_free, group, prefill_s, decode_s, whole_s);
        size_t begin = count;
        count = append(&lists.prefill, chosen, begin, count);
        count = append(&lists.decode, chosen, begin, count);
        count = append(&lists.decodes_whole, chosen, begin, count);
        count = append(&lists.whole, chosen, begin, count);
    }
    return count;
}
