// One step of decoding on a CPU: what model.py's features() and lm_head compute for one new token per row, against the slots of a
// SlidingCache. fast/step.py compiles this file for one model (gcc 12 or clang, OpenMP) and calls step().
//
// The time of a step is that of reading the weights and the keys once, if everything else keeps out of the way: so weights are read
// in order, as they lie in PyTorch's tensors, 16 outputs at a time; sums are float32, 16 lanes wide; and one parallel region spans
// the step. Defined by the caller: C = n_embd, H, HKV = heads, D = head_dim, I = n_inner, all but the heads multiples of 16;
// BF16 = whether the model is bfloat16 or float32; INT8 = whether its matrices are int8 with a scale per output;
// CHUNK = slots per task of the attention.
#if __AVX512F__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define G (H / HKV)           // query heads per key head
#define WIDE (I > HKV * D ? I : HKV * D)
#define PART (G * (D + 2))    // floats that a task leaves: weighted values, then per head the largest score and the sum of weights

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
#if BF16
typedef uint16_t number;
typedef uint16_t numbers __attribute__((vector_size(2 * LANES), aligned(2)));
#if __AVX512F__  // what gcc 12 makes of the line for all others is three times as long
static inline vec load(const number *x) { return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((void *)x)), 16); }
#else
static inline vec load(const number *x) { return (vec)(__builtin_convertvector(*(const numbers *)x, ints) << 16); }
#endif
static inline float one(number x) { union { uint32_t i; float f; } u = {(uint32_t)x << 16}; return u.f; }
static inline number rounded(float x) { union { float f; uint32_t i; } u = {x}; return (u.i + 0x7fff + (u.i >> 16 & 1)) >> 16; }
#else
typedef float number;
static inline vec load(const number *x) { return *(const vec *)x; }
static inline float one(number x) { return x; }
static inline number rounded(float x) { return x; }
#endif
#if INT8
typedef int8_t weight;
typedef int8_t weights __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES)));
#if __AVX512F__
static inline vec load_weight(const weight *x) { return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((void *)x))); }
#else
static inline vec load_weight(const weight *x) {
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(*(const weights *)x, shorts), ints), vec);
}
#endif
#else
typedef number weight;
static inline vec load_weight(const weight *x) { return load(x); }
#endif

// A matrix, with a scale per output if it is int8. Then a layer as fast/step.py lays it out: 8 bytes per field, NULL for what is not there.
typedef struct { const weight *data; const float *scale; } matrix;
typedef struct {
    matrix q, k, v, o, gate, up, down;
    const number *input_norm, *post_norm, *q_norm, *k_norm, *q_bias, *k_bias, *v_bias;
    number *keys, *values;          // (rows of the cache, HKV, slots, D)
    int64_t slots, window;          // window: 0, or with rope="reset" the window, P + window - 1 being the largest seeming position
    const int64_t *slot, *valid;    // (B, slot_heads): where the new token goes; (B,): how many slots count, with it
    int64_t slot_heads;             // 1, or HKV if every key head evicts another token
} layer;

// Lane i of the result is the sum of the lanes of a[i].
static inline vec sums(vec *a) {
#pragma GCC unroll 4
    for (int n = LANES / 2; n; n /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            vec x = a[2 * i], y = a[2 * i + 1];
            a[i] = __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
                 + __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
        }
    return a[0];
}

// exp(x) for x <= 0: a power of two for the whole part of x / log 2 and a polynomial for the rest. Relative error below 3e-7.
static inline vec exponential(vec x) {
    for (int i = 0; i < LANES; i++) x[i] = x[i] < -87.0f ? -87.0f : x[i];  // NaN stays
    vec t = x * 1.44269504f;
    ints n = __builtin_convertvector(t - 0.5f, ints);
    vec f = t - __builtin_convertvector(n, vec), y = f * 1.535336188e-4f + 1.339887440e-3f;
    y = y * f + 9.618437357e-3f;
    y = y * f + 5.550332471e-2f;
    y = y * f + 2.402264791e-1f;
    y = y * f + 6.931472028e-1f;
    y = y * f + 1.0f;
    return (vec)((ints)y + (n << 23));
}

// ---------------------------------------------------------------------------------------------------------------------
// matrix products; the functions that say "omp for" are called by all threads at once

// R rows of x (R, n) times 16 rows of w, from row `first` of m; rows beyond the last repeat it and are not written.
static inline __attribute__((always_inline)) void block(const int R, float *out, const float *x, matrix w, const number *bias, int first,
                                                        int m, int n, int add) {
    const int U = R < 4 ? 4 / R : 1;  // sums per output: an addition need not wait for the one before
    vec a[R][LANES];
    for (int i = 0; i < LANES; i++) {
        const weight *row = w.data + (int64_t)(first + i < m ? first + i : m - 1) * n;
        vec sum[R][4 / R + 1];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int u = 0; u < U; u++) sum[r][u] = (vec){0};
        int c = 0;
        for (; c + U * LANES <= n; c += U * LANES)
#pragma GCC unroll 4
            for (int u = 0; u < U; u++) {
                vec v = load_weight(row + c + u * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) sum[r][u] += *(const vec *)(x + (int64_t)r * n + c + u * LANES) * v;
            }
        for (; c < n; c += LANES)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r][0] += *(const vec *)(x + (int64_t)r * n + c) * load_weight(row + c);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int u = 1; u < U; u++) sum[r][0] += sum[r][u];
            a[r][i] = sum[r][0];
        }
    }
    for (int r = 0; r < R; r++) {
        vec y = sums(a[r]);
        for (int i = 0; i < LANES && first + i < m; i++) {
            float *o = out + (int64_t)r * m + first + i;
            *o = (add ? *o : 0) + y[i] * (INT8 ? w.scale[first + i] : 1) + (bias ? one(bias[first + i]) : 0);
        }
    }
}

// out (B, m) = x (B, n) w^T + bias, or that much more. Threads do not wait for each other at the end.
static void product(float *out, const float *x, matrix w, const number *bias, int B, int m, int n, int add) {
#pragma omp for schedule(static) nowait
    for (int first = 0; first < m; first += LANES)
        for (int b = 0, left; (left = B - b) > 0; b += left < 2 ? 1 : left < 4 ? 2 : left < 8 ? 4 : 8) {
            float *o = out + (int64_t)b * m;
            const float *y = x + (int64_t)b * n;
            if (left < 2) block(1, o, y, w, bias, first, m, n, add);
            else if (left < 4) block(2, o, y, w, bias, first, m, n, add);
            else if (left < 8) block(4, o, y, w, bias, first, m, n, add);
            else block(8, o, y, w, bias, first, m, n, add);
        }
}

static inline void rms_norm(float *out, const float *x, const number *w, int n, float eps) {
    vec square = {0};
    float mean = 0;
    for (int c = 0; c < n; c += LANES) square += *(const vec *)(x + c) * *(const vec *)(x + c);
    for (int i = 0; i < LANES; i++) mean += square[i] / n;
    float scale = 1 / sqrtf(mean + eps);
    for (int c = 0; c < n; c += LANES) *(vec *)(out + c) = *(const vec *)(x + c) * scale * load(w + c);
}

// out (B, n) = x (B, n), each row divided by its root mean square and multiplied by w
static void norms(float *out, const float *x, const number *w, int B, int n, float eps) {
#pragma omp for schedule(static)
    for (int b = 0; b < B; b++) rms_norm(out + (int64_t)b * n, x + (int64_t)b * n, w, n, eps);
}

// ---------------------------------------------------------------------------------------------------------------------
// attention

// heads x D numbers, turned by the angles of a position and multiplied by `scale`
static inline void rotate(float *out, const float *x, int heads, int64_t pos, const float *freqs, float scale) {
    for (int d = 0; d < D / 2; d++) {
        float angle = (float)pos * freqs[d], cos = cosf(angle) * scale, sin = sinf(angle) * scale;
        for (int h = 0; h < heads; h++) {
            float a = x[h * D + d], b = x[h * D + D / 2 + d];
            out[h * D + d] = a * cos - b * sin, out[h * D + D / 2 + d] = b * cos + a * sin;
        }
    }
}

// One task, as in flash decoding: n slots of a key head, the first `prefix` of which meet q_prefix, and the G queries of the head.
static void task(const float *q, const float *q_prefix, const number *keys, const number *values, int n, int64_t prefix, float *part) {
    float p[G][CHUNK] __attribute__((aligned(64)));
    for (int j = 0; j < n; j += LANES) {
        vec a[G][LANES];
        for (int i = 0; i < LANES; i++) {
            int slot = j + i < n ? j + i : n - 1;  // lanes beyond the end repeat the last slot, and weigh nothing below
            const float *query = slot < prefix ? q_prefix : q;
            const number *key = keys + (int64_t)slot * D;
#pragma GCC unroll 16
            for (int d = 0; d < D; d += LANES) {
                vec k = load(key + d);
#pragma GCC unroll 8
                for (int g = 0; g < G; g++) {
                    vec term = *(const vec *)(query + g * D + d) * k;
                    a[g][i] = d ? a[g][i] + term : term;
                }
            }
        }
        for (int g = 0; g < G; g++) *(vec *)(p[g] + j) = sums(a[g]);
    }
    for (int g = 0; g < G; g++) {
        float largest = p[g][0], total = 0;
        for (int j = 1; j < n; j++) largest = p[g][j] > largest ? p[g][j] : largest;
        for (int j = 0; j < n; j += LANES) *(vec *)(p[g] + j) = exponential(*(vec *)(p[g] + j) - largest);
        for (int j = 0; j < n; j++) total += p[g][j];
        part[G * D + g] = largest, part[G * D + G + g] = total;
    }
    vec y[G][D / LANES];
    memset(y, 0, sizeof y);
    for (int j = 0; j < n; j++)
#pragma GCC unroll 16
        for (int d = 0; d < D / LANES; d++) {
            vec v = load(values + (int64_t)j * D + d * LANES);
            for (int g = 0; g < G; g++) y[g][d] += p[g][j] * v;
        }
    memcpy(part, y, sizeof y);
}

// q, q_prefix (B, H, D), scaled -> out (B, H, D). parts: room for B * HKV * tasks * PART floats.
static void attention(float *out, const float *q, const float *q_prefix, const layer *w, const int64_t *P, float *parts, int B) {
    int tasks = (w->slots + CHUNK - 1) / CHUNK;
#pragma omp for schedule(static)
    for (int t = 0; t < B * HKV * tasks; t++) {
        int64_t head = t / tasks, row = head / HKV, from = (int64_t)(t % tasks) * CHUNK, at = (head * w->slots + from) * D;
        int64_t n = w->valid[row] - from < CHUNK ? w->valid[row] - from : CHUNK;
        if (n > 0)
            task(q + head * G * D, q_prefix + head * G * D, w->keys + at, w->values + at, n, P[row] - from, parts + (int64_t)t * PART);
    }
#pragma omp for schedule(static)
    for (int x = 0; x < B * H; x++) {
        int64_t head = x / G, g = x % G, used = (w->valid[head / HKV] + CHUNK - 1) / CHUNK;
        float largest = -INFINITY, total = 0, *part = parts + head * tasks * PART, *y = out + (int64_t)x * D;
        for (int t = 0; t < used; t++) largest = fmaxf(largest, part[t * PART + G * D + g]);
        memset(y, 0, D * sizeof *y);
        for (int t = 0; t < used; t++) {
            float weight = expf(part[t * PART + G * D + g] - largest);
            total += weight * part[t * PART + G * D + G + g];
            for (int d = 0; d < D; d++) y[d] += weight * part[t * PART + g * D + d];
        }
        for (int d = 0; d < D; d++) y[d] /= total;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// the step

// x (B, C): the embeddings of the new tokens at the positions pos (B,), overwritten. P (B,): prefixes. logits (B, V).
// room: floats for B * (C + 4 * H * D + 2 * WIDE) and for the parts of the attention.
void step(float *x, float *logits, const layer *layers, const number *norm, matrix head, const int64_t *pos, const int64_t *P,
          const float *freqs, float *room, int B, int L, int V, float rope_factor, float eps) {
    float *h = room, *q = h + B * C, *q_turned = q + B * H * D, *q_prefix = q_turned + B * H * D, *y = q_prefix + B * H * D;
    float *gate = y + B * H * D, *up = gate + B * WIDE, *parts = up + B * WIDE, *k = gate, *v = up;  // never needed at the same time
#pragma omp parallel
    {
        for (const layer *w = layers; w < layers + L; w++) {
            norms(h, x, w->input_norm, B, C, eps);
            product(q, h, w->q, w->q_bias, B, H * D, C, 0);
            product(k, h, w->k, w->k_bias, B, HKV * D, C, 0);
            product(v, h, w->v, w->v_bias, B, HKV * D, C, 0);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int b = 0; b < B; b++) {
                float *qb = q + b * H * D, *kb = k + b * HKV * D, turned[HKV * D];
                int64_t seeming = P[b] + w->window - 1 < pos[b] ? P[b] + w->window - 1 : pos[b];
                for (int i = 0; w->q_norm && i < H; i++) rms_norm(qb + i * D, qb + i * D, w->q_norm, D, eps);
                for (int i = 0; w->q_norm && i < HKV; i++) rms_norm(kb + i * D, kb + i * D, w->k_norm, D, eps);
                rotate(q_turned + b * H * D, qb, H, pos[b], freqs, rope_factor / sqrtf(D));
                if (w->window) rotate(q_prefix + b * H * D, qb, H, seeming, freqs, rope_factor / sqrtf(D));
                rotate(turned, kb, HKV, pos[b], freqs, rope_factor);
                for (int i = 0; i < HKV * D; i++) {
                    int64_t slot = w->slot[b * w->slot_heads + i / D % w->slot_heads], at = ((b * HKV + i / D) * w->slots + slot) * D + i % D;
                    w->keys[at] = rounded(turned[i]), w->values[at] = rounded(v[b * HKV * D + i]);
                }
            }
            attention(y, q_turned, w->window ? q_prefix : q_turned, w, P, parts, B);
            product(x, y, w->o, NULL, B, C, H * D, 1);
#pragma omp barrier
            norms(h, x, w->post_norm, B, C, eps);
            product(gate, h, w->gate, NULL, B, I, C, 0);
            product(up, h, w->up, NULL, B, I, C, 0);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int i = 0; i < B * I; i += LANES) {
                vec g = *(vec *)(gate + i), size = g, e;
                for (int j = 0; j < LANES; j++) size[j] = -fabsf(g[j]);
                e = exponential(size);
                for (int j = 0; j < LANES; j++) gate[i + j] = g[j] / (1 + e[j]) * (g[j] < 0 ? e[j] : 1) * up[i + j];
            }
            product(x, gate, w->down, NULL, B, C, I, 1);
#pragma omp barrier
        }
        norms(h, x, norm, B, C, eps);
        product(logits, h, head, NULL, B, V, C, 0);
    }
}
