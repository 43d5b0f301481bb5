// Rows of tensors in memory, read and written in vectors of 16 numbers, whatever their dtype.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

using Index = int64_t;

enum Dtype : int64_t { F32, BF16, F16 };

// ---------------------------------------------------------------------------------------------- vectors of 16 numbers

constexpr Index LANES = 16;
typedef float Vector __attribute__((vector_size(64)));
typedef float InMemory __attribute__((vector_size(64), aligned(4), may_alias));  // a Vector that may begin anywhere
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef int32_t Mask __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t HalvesInMemory __attribute__((vector_size(32), aligned(2), may_alias));

// A vector, or at the end of a row one number.
template <class T> static inline T at(const float* from) {
    if constexpr (sizeof(T) == sizeof(Vector)) return *(const InMemory*)from;
    else return *from;
}
static inline void set(float* to, Vector value) { *(InMemory*)to = value; }
static inline void set(float* to, float value) { *to = value; }

static inline float from_bf16(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

static inline Vector from_bf16(Halves halves) { return (Vector)(__builtin_convertvector(halves, Bits) << 16); }

static inline uint16_t to_bf16(float number) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &number, 4);
    return number != number ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline Halves to_bf16(Vector numbers) {
    const Bits bits = (Bits)numbers, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Mask nan = numbers != numbers;
    return __builtin_convertvector(((Bits)nan & 0x7fc0) | (~(Bits)nan & rounded), Halves);
}

static inline float from_f16(uint16_t half) { _Float16 number; memcpy(&number, &half, 2); return float(number); }
static inline uint16_t to_f16(float number) { const _Float16 half = _Float16(number); uint16_t bits; memcpy(&bits, &half, 2); return bits; }

#if defined(__AVX512F__)
static inline Vector from_f16(Halves halves) { return (Vector)_mm512_maskz_cvtph_ps(-1, (__m256i)halves); }
static inline Halves to_f16(Vector numbers) { return (Halves)_mm512_maskz_cvtps_ph(-1, (__m512)numbers, _MM_FROUND_TO_NEAREST_INT); }
#else
static inline Vector from_f16(Halves halves) { Vector v; for (int k = 0; k < LANES; k++) v[k] = from_f16(halves[k]); return v; }
static inline Halves to_f16(Vector numbers) { Halves h; for (int k = 0; k < LANES; k++) h[k] = to_f16(numbers[k]); return h; }
#endif

template <class T> static inline T rounded(T value, int64_t dtype) {
    return dtype == BF16 ? from_bf16(to_bf16(value)) : dtype == F16 ? from_f16(to_f16(value)) : value;
}

// What the compiler knows about a junction before it sees one; ASK leaves it to be looked up.
enum Known { NO, YES, ASK };
static constexpr bool known(Known what, bool asked) { return what == ASK ? asked : what == YES; }

// ---------------------------------------------------------------------------------------------- rows

struct Tensor {
    char* data;
    int64_t dtype;
    Index size() const { return dtype == F32 ? 4 : 2; }
    explicit operator bool() const { return data != nullptr; }
};

// Parts of the next row that are still to be fetched; each loop over this row fetches two of them.
struct Ahead {
    struct Part { const char* row; Index size; };
    Part parts[6];
    int n = 0;
    void add(Tensor t, Index row, Index width) {
        if (t) parts[n++] = {t.data + row * width * t.size(), t.size()};
    }
    Part next() { return n ? parts[--n] : Part{(const char*)parts, 0}; }  // with none left, what is in the cache anyway
};

// Does f for every vector of the row, then for the numbers that are left.
template <class F> static inline void each(Index n, Ahead& ahead, F f) {
    const Ahead::Part one = ahead.next(), other = ahead.next();
    Index j = 0;
    for (; j + LANES <= n; j += LANES) {
        __builtin_prefetch(one.row + j * one.size, 0, 2);
        __builtin_prefetch(other.row + j * other.size, 0, 2);
        f(j, Vector{});
    }
    for (; j < n; j++) f(j, float{});
}

// A sum over the row.
struct Total {
    Vector numbers = {};
    float rest = 0;
    void add(Vector v) { numbers += v; }
    void add(float v) { rest += v; }
    float value() const {
        float total = rest;
        for (int k = 0; k < 4; k++) total += (numbers[k] + numbers[k + 4]) + (numbers[k + 8] + numbers[k + 12]);
        return total;
    }
};

// The row in float32: itself, or converted into the buffer.
static const float* read(Tensor t, Index row, Index n, float* buffer) {
    const char* from = t.data + row * n * t.size();
    if (t.dtype == F32) return (const float*)from;
    const uint16_t* halves = (const uint16_t*)from;
    Index j = 0;
    if (t.dtype == BF16) {
        for (; j + LANES <= n; j += LANES) set(buffer + j, from_bf16(*(const HalvesInMemory*)(halves + j)));
        for (; j < n; j++) buffer[j] = from_bf16(halves[j]);
    } else {
        for (; j + LANES <= n; j += LANES) set(buffer + j, from_f16(*(const HalvesInMemory*)(halves + j)));
        for (; j < n; j++) buffer[j] = from_f16(halves[j]);
    }
    return buffer;
}

// A row that is read once, converted as it is read.
struct Source {
    const char* data;
    int64_t dtype;
    float number(Index j, float) const {
        if (dtype == F32) return ((const float*)data)[j];
        const uint16_t half = ((const uint16_t*)data)[j];
        return dtype == BF16 ? from_bf16(half) : from_f16(half);
    }
    Vector number(Index j, Vector) const {
        if (dtype == F32) return at<Vector>((const float*)data + j);
        const Halves halves = *(const HalvesInMemory*)((const uint16_t*)data + j);
        return dtype == BF16 ? from_bf16(halves) : from_f16(halves);
    }
};

// Where a row is written, number by number, past the caches if it is part of a large tensor.
struct Row {
    char* data;
    int64_t dtype;
    bool past_cache;

    Row(Tensor t, Index row, Index n, bool large, Known f32)
        : data(t ? t.data + row * n * t.size() : nullptr), dtype(f32 == YES ? F32 : t.dtype), past_cache(large && (uintptr_t)data % 64 == 0) {}

    void put(Index j, float number) const {
        if (!data) return;
        if (dtype == F32) ((float*)data)[j] = number;
        else ((uint16_t*)data)[j] = dtype == BF16 ? to_bf16(number) : to_f16(number);
    }

    void put(Index j, Vector numbers) const {
        if (!data) return;
        if (dtype == F32) {
            float* to = (float*)data + j;
#if defined(__AVX512F__)
            if (past_cache) return _mm512_stream_ps(to, (__m512)numbers);
#endif
            set(to, numbers);
        } else {
            const Halves halves = dtype == BF16 ? to_bf16(numbers) : to_f16(numbers);
            uint16_t* to = (uint16_t*)data + j;
#if defined(__AVX512F__)
            if (past_cache) return _mm256_stream_si256((__m256i*)to, (__m256i)halves);
#endif
            *(HalvesInMemory*)to = halves;
        }
    }
};
