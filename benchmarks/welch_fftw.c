/* Welch peaks in C: the mark that `benchmarks.welch_peers` measures against.
 *
 * Two segments are one complex FFT of FFTW (|X1|^2 + |X2|^2 = (|Z[b]|^2 + |Z[n-b]|^2) / 2), an odd one out
 * goes with zeros, as FFTW's real FFT is no faster; a row stays in a core's cache from samples to peaks; rows
 * are shared out among threads that live as long as the plan. The k largest powers are found by insertion into
 * a sorted list, or faster, by a threshold and ranks. Signals are finite.
 *
 * cc -O3 -march=native -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros -shared -fPIC welch_fftw.c -o libwelch_fftw.so -lfftw3f -lm -pthread
 */
#define _GNU_SOURCE
#include <fftw3.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16, MAX_RANKED = 1024, SPINS = 4000, GRAIN_SAMPLES = 1 << 15, PLAN_SECONDS = 5 };

typedef float Floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int Ints __attribute__((vector_size(LANES * sizeof(int))));

typedef struct Welch Welch;

typedef struct { /* What one thread works in. */
    fftwf_complex *packed, *spectrum;
    float *magnitude, *power, *group, *value;
    int *bin, *ties;
} Scratch;

typedef struct {
    Welch *welch;
    Scratch scratch;
    pthread_t id;
} Worker;

struct Welch {
    int n, n_segments, n_bins, k, threads, inserts;
    float *window, *zeros;
    fftwf_plan plan;
    Worker *workers; /* The first is the calling thread. */
    /* The run in progress. */
    const float *signal;
    float *out;
    long batch, stride, grain;
    atomic_long next;
    atomic_int generation, busy, stop;
    pthread_mutex_t mutex;
    pthread_cond_t woken;
};

static long rounded(long count, long to) { return (count + to - 1) / to * to; }

static void *scratch_of(size_t count, size_t size) {
    size_t bytes = rounded(count * size, 64);
    void *memory = aligned_alloc(64, bytes);
    if (memory) memset(memory, 0, bytes);
    return memory;
}

static Scratch new_scratch(int n, int n_bins) {
    size_t bins = rounded(n_bins, LANES) + 2 * LANES;
    return (Scratch){
        .packed = scratch_of(n, sizeof(fftwf_complex)),
        .spectrum = scratch_of(n, sizeof(fftwf_complex)),
        .magnitude = scratch_of(n + LANES, sizeof(float)),
        .power = scratch_of(bins, sizeof(float)),
        .group = scratch_of(2 * bins, sizeof(float)),
        .value = scratch_of(bins, sizeof(float)),
        .bin = scratch_of(bins, sizeof(int)),
        .ties = scratch_of(bins, sizeof(int)),
    };
}

static void free_scratch(Scratch *s) {
    free(s->packed), free(s->spectrum), free(s->magnitude), free(s->power);
    free(s->group), free(s->value), free(s->bin), free(s->ties);
}

static void add_pair(const Welch *w, Scratch *s, const float *restrict first, const float *restrict second) {
    const int n = w->n, half = n / 2;
    const float *restrict window = w->window;
    float *restrict packed = (float *)s->packed, *restrict magnitude = s->magnitude;
    float *restrict power = s->power;
    for (int i = 0; i < n; i++) {
        packed[2 * i] = first[i] * window[i];
        packed[2 * i + 1] = second[i] * window[i];
    }
    fftwf_execute_dft(w->plan, s->packed, s->spectrum);
    const float *restrict z = (const float *)s->spectrum;
    for (int i = 0; i < n; i++) magnitude[i] = z[2 * i] * z[2 * i] + z[2 * i + 1] * z[2 * i + 1];
    magnitude[n] = magnitude[0];
    for (int b = 0; b <= half; b++) power[b] += 0.5f * (magnitude[b] + magnitude[n - b]);
}

/* Set counts[i] to how many of `count` values are greater than values[i]; beyond them stands -1. */
static void count_greater(const float *values, int count, int *counts) {
    for (int i = 0; i < count; i += LANES) {
        Floats mine = *(const Floats *)(values + i);
        Ints greater = {0};
        for (int j = 0; j < count; j++) greater -= values[j] > mine;
        *(Ints *)(counts + i) = greater;
    }
}

/* Return a power that at least k bins reach: the k-th largest of the maxima of disjoint groups of bins. */
static float threshold_of(const float *restrict power, int n_bins, int k, float *restrict group, int *ranks) {
    int groups = rounded(k, LANES);
    if (2 * groups >= n_bins) {
        if (groups >= n_bins) return -1.0f;
    } else if (8 * groups <= n_bins && groups <= 2 * LANES) {
        groups *= 2;
    }
    memcpy(group, power, groups * sizeof(float));
    int start = groups;
    for (; start + groups <= n_bins; start += groups)
        for (int g = 0; g < groups; g++) group[g] = power[start + g] > group[g] ? power[start + g] : group[g];
    for (int g = 0; start + g < n_bins; g++)
        group[g] = power[start + g] > group[g] ? power[start + g] : group[g];
    count_greater(group, groups, ranks);
    float threshold = INFINITY;
    for (int g = 0; g < groups; g++)
        threshold = ranks[g] < k && group[g] < threshold ? group[g] : threshold;
    return threshold;
}

/* Keep a sorted list of (bin, power); without `bin` they are counted. */
static void insert_all(const float *value, const int *bin, int count, int k, float *restrict out) {
    int kept = 0;
    for (int c = 0; c < count; c++) {
        if (kept == k && value[c] <= out[2 * k - 1]) continue;
        int slot = kept < k ? kept++ : k - 1;
        for (; slot > 0 && out[2 * slot - 1] < value[c]; slot--)
            memcpy(out + 2 * slot, out + 2 * slot - 2, 2 * sizeof(float));
        out[2 * slot] = (float)(bin ? bin[c] : c), out[2 * slot + 1] = value[c];
    }
}

static void top_k(Scratch *s, int n_bins, int k, float *restrict out) {
    const float *restrict power = s->power;
    float *restrict value = s->value;
    int *restrict bin = s->bin, *restrict ties = s->ties;
    float threshold = threshold_of(power, n_bins, k, s->group, ties);
    int count = 0;
    for (int b = 0; b < n_bins; b += LANES) {
        unsigned some = 0; /* The pre-test: most blocks of a long spectrum hold nothing. */
        for (int lane = 0; lane < LANES; lane++) some |= power[b + lane] >= threshold;
        if (!some) continue;
        int end = b + LANES < n_bins ? b + LANES : n_bins;
        for (int c = b; c < end; c++) {
            value[count] = power[c], bin[count] = c;
            count += power[c] >= threshold;
        }
    }
    if (count > MAX_RANKED) { /* As from a spectrum that is flat or falls. */
        insert_all(value, bin, count, k, out);
        return;
    }
    for (int c = count; c < rounded(count, LANES); c++) value[c] = -1.0f;
    int *restrict ranks = (int *)s->group;
    count_greater(value, count, ranks);
    memset(ties, 0, count * sizeof(int));
    for (int c = 0; c < count; c++) {
        int rank = ranks[c] + ties[ranks[c]]++; /* Equal ones lie in the order of their bins. */
        if (rank < k) out[2 * rank] = (float)bin[c], out[2 * rank + 1] = value[c];
    }
}

static void run_row(const Welch *w, Scratch *s, const float *samples, float *out) {
    const int hop = w->n / 2, k = w->k < w->n_bins ? w->k : w->n_bins;
    int segment = 0;
    memset(s->power, 0, w->n_bins * sizeof(float));
    for (; segment + 1 < w->n_segments; segment += 2)
        add_pair(w, s, samples + segment * hop, samples + (segment + 1) * hop);
    if (segment < w->n_segments) add_pair(w, s, samples + segment * hop, w->zeros);
    const float scale = 2.0f / w->n_segments;
    for (int b = 0; b < w->n_bins; b++) s->power[b] *= scale;
    s->power[0] *= 0.5f, s->power[w->n_bins - 1] *= 0.5f;
    for (int b = w->n_bins; b < rounded(w->n_bins, LANES); b++) s->power[b] = -1.0f;
    if (w->inserts)
        insert_all(s->power, NULL, w->n_bins, k, out);
    else
        top_k(s, w->n_bins, k, out);
    memset(out + 2 * k, 0, 2 * (w->k - k) * sizeof(float));
}

static void take_rows(Welch *w, Scratch *s) {
    for (;;) {
        long start = atomic_fetch_add(&w->next, w->grain);
        if (start >= w->batch) return;
        long end = start + w->grain < w->batch ? start + w->grain : w->batch;
        for (long row = start; row < end; row++)
            run_row(w, s, w->signal + row * w->stride, w->out + row * 2 * w->k);
    }
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void *work(void *argument) {
    Worker *worker = argument;
    Welch *w = worker->welch;
    for (int seen = 0;;) {
        for (int spin = 0; spin < SPINS && atomic_load(&w->generation) == seen; spin++) pause_briefly();
        pthread_mutex_lock(&w->mutex);
        while (atomic_load(&w->generation) == seen) pthread_cond_wait(&w->woken, &w->mutex);
        pthread_mutex_unlock(&w->mutex);
        seen = atomic_load(&w->generation);
        if (atomic_load(&w->stop)) return NULL;
        take_rows(w, &worker->scratch);
        atomic_fetch_sub(&w->busy, 1);
    }
}

static void wake(Welch *w) {
    pthread_mutex_lock(&w->mutex);
    atomic_fetch_add(&w->generation, 1);
    pthread_cond_broadcast(&w->woken);
    pthread_mutex_unlock(&w->mutex);
}

/* Plan for one shape of row, selection by insertion or not; NULL if there is no memory or no thread. */
Welch *welch_new(int n_fft, int n_segments, int k, int threads, int inserts) {
    Welch *w = calloc(1, sizeof(Welch));
    if (!w) return NULL;
    w->n = n_fft, w->n_segments = n_segments, w->n_bins = n_fft / 2 + 1, w->k = k, w->threads = threads;
    w->inserts = inserts;
    w->window = scratch_of(n_fft, sizeof(float)), w->zeros = scratch_of(n_fft, sizeof(float));
    for (int i = 0; i < n_fft; i++) w->window[i] = 0.5 * (1.0 - cos(2.0 * M_PI * i / (n_fft - 1)));
    w->workers = calloc(threads, sizeof(Worker));
    pthread_mutex_init(&w->mutex, NULL), pthread_cond_init(&w->woken, NULL);
    for (int t = 0; t < threads; t++)
        w->workers[t] = (Worker){.welch = w, .scratch = new_scratch(w->n, w->n_bins)};
    Scratch *s = &w->workers[0].scratch;
    fftwf_set_timelimit(PLAN_SECONDS);
    w->plan = fftwf_plan_dft_1d(n_fft, s->packed, s->spectrum, FFTW_FORWARD, FFTW_PATIENT);
    for (int t = 1; t < threads; t++)
        if (pthread_create(&w->workers[t].id, NULL, work, &w->workers[t])) {
            w->threads = t;
            break;
        }
    return w;
}

/* Write the peaks (bin, power) of `batch` rows, `stride` samples apart, to `out` [batch, k, 2]. */
void welch_run(Welch *w, const float *signal, long batch, long stride, float *out) {
    w->signal = signal, w->out = out, w->batch = batch, w->stride = stride;
    long most = GRAIN_SAMPLES / (w->n * w->n_segments), share = batch / (4 * w->threads);
    w->grain = share < most ? share : most;
    if (w->grain < 1) w->grain = 1;
    atomic_store(&w->next, 0);
    int helped = w->threads > 1 && batch > 1 && batch * w->n * w->n_segments >= 4096;
    if (helped) {
        atomic_store(&w->busy, w->threads - 1);
        wake(w);
    }
    take_rows(w, &w->workers[0].scratch);
    while (helped && atomic_load(&w->busy) > 0) pause_briefly();
}

void welch_free(Welch *w) {
    atomic_store(&w->stop, 1);
    wake(w);
    for (int t = 1; t < w->threads; t++) pthread_join(w->workers[t].id, NULL);
    for (int t = 0; t < w->threads; t++) free_scratch(&w->workers[t].scratch);
    fftwf_destroy_plan(w->plan);
    pthread_mutex_destroy(&w->mutex), pthread_cond_destroy(&w->woken);
    free(w->workers), free(w->window), free(w->zeros), free(w);
}
