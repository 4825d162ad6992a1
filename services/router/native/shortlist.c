/* The cheapest workers of a large fleet, for which the costs of all are estimated. See shortlist.py. */
#include <math.h>

#include "cost.h"

/* Rows are estimated by the instructions that a machine has for several numbers at once. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

enum { PASSED_OVER = 16 }; /* rows that are passed over together, if none of them is cheap */

/* Rows behind each other that have the same group and block size, and may all fetch KV, or none. */
struct run {
    size_t first, end;
    struct prefix prefix; /* of the first row; the others differ in `held` */
};

static bool is_alike(const struct fleet *fleet, size_t row, size_t other)
{
    const double *block_sizes = fleet->numbers + BLOCK_SIZE * fleet->stride;
    return block_sizes[row] == block_sizes[other] && fleet->groups[row] == fleet->groups[other] &&
           flag(fleet, EXCHANGES_KV, row) == flag(fleet, EXCHANGES_KV, other);
}

static struct run run_from(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                           size_t first)
{
    struct run run = {first, first + 1, prefix_of(fleet, question, holders, first)};
    while (run.end < fleet->count && is_alike(fleet, first, run.end))
        run.end++;
    return run;
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

/* The least of `PASSED_OVER` costs that are numbers. */
FOR_EACH_MACHINE static double least_of(const double *costs_s)
{
    enum { LANES = 8 };
    double least_s[LANES];
    for (int lane = 0; lane < LANES; lane++)
        least_s[lane] = costs_s[lane] < INFINITY ? costs_s[lane] : INFINITY;
    for (int i = LANES; i < PASSED_OVER; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            least_s[lane] = costs_s[i + lane] < least_s[lane] ? costs_s[i + lane] : least_s[lane];
    for (int lane = 1; lane < LANES; lane++)
        least_s[0] = least_s[lane] < least_s[0] ? least_s[lane] : least_s[0];
    return least_s[0];
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

size_t shortlist(const struct fleet *fleet, const struct question *question, const struct holders *holders,
                 const uint8_t *is_free, size_t *chosen, double *costs_s)
{
    double *prefill_s = costs_s, *decode_s = prefill_s + fleet->count, *whole_s = decode_s + fleet->count;
    for (size_t row = 0; row < fleet->count;) {
        struct run run = run_from(fleet, question, holders, row);
        estimate_run(fleet, question, holders->blocks, &run, prefill_s, decode_s, whole_s);
        row = run.end;
    }
    bool is_left = true; /* whether a group may be left */
    int64_t group = INT64_MIN;
    size_t count = 0;
    while (is_left) {
        /* The groups in ascending order; mostly there is one, whose rows are then all visited once. */
        int64_t next = INT64_MAX, this_one = INT64_MAX;
        for (size_t row = 0; row < fleet->count; row++)
            if (is_free[row] && fleet->groups[row] >= group) {
                int64_t of_row = fleet->groups[row];
                if (of_row < this_one) {
                    next = this_one;
                    this_one = of_row;
                } else if (of_row > this_one && of_row < next)
                    next = of_row;
            }
        if (this_one == INT64_MAX)
            break;
        struct lists lists = {0};
        for (size_t row = 0; row < fleet->count; row++) {
            if (row % PASSED_OVER == 0 && row + PASSED_OVER <= fleet->count) {
                double least_s = least_of(whole_s + row);
                if (!few_takes(&lists.prefill, least_of(prefill_s + row)) &&
                    !few_takes(&lists.decode, least_of(decode_s + row)) &&
                    !few_takes(&lists.decodes_whole, least_s) && !few_takes(&lists.whole, least_s)) {
                    row += PASSED_OVER - 1;
                    continue;
                }
            }
            if (!is_free[row] || fleet->groups[row] != this_one)
                continue;
            if (flag(fleet, PREFILLS, row))
                few_add(&lists.prefill, row, prefill_s[row]);
            if (flag(fleet, DECODES, row)) {
                few_add(&lists.decode, row, decode_s[row]);
                few_add(&lists.decodes_whole, row, whole_s[row]);
            }
            few_add(&lists.whole, row, whole_s[row]);
        }
        size_t begin = count;
        count = append(&lists.prefill, chosen, begin, count);
        count = append(&lists.decode, chosen, begin, count);
        count = append(&lists.decodes_whole, chosen, begin, count);
        count = append(&lists.whole, chosen, begin, count);
        group = next;
        is_left = next != INT64_MAX;
    }
    return count;
}
