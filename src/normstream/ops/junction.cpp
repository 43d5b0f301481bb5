// The fused junction of form.py on a CPU: one pass over the rows forward, one backward. Plain C interface, no headers of torch.
//
// While the vectors of one row are worked on in the first-level cache, the next row is fetched. Outputs larger than the caches are
// written past them. Gradients of gains are summed over fixed blocks of rows, then over the blocks, so that they do not depend on
// the number of threads.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <omp.h>

#include "rows.h"

enum Kind : int64_t { NONE, RMS, LAYER };
enum Slot { OUT, X, Y, IN, SLOTS };

// ---------------------------------------------------------------------------------------------- norms of a row

struct Norm {
    int64_t kind, round_normalized, round_product;
    float eps;
    const float *gain, *bias;  // null where there is none
    bool rounds() const { return round_normalized || round_product; }
};

struct Statistics {
    float mean, rstd;
    template <bool centred, class T> T normalized(const float* h) const { return (centred ? at<T>(h) - mean : at<T>(h)) * rstd; }
};

// Conventions of all norms of a junction.
struct Convention {
    Known layer, bias, gain, rounds;
    bool fits(const Norm& norm) const {
        return norm.kind == NONE || (known(layer, norm.kind == LAYER) == (norm.kind == LAYER) && known(bias, norm.bias) == bool(norm.bias) &&
                                     known(gain, norm.gain) == bool(norm.gain) && known(rounds, norm.rounds()) == norm.rounds());
    }
};
constexpr Convention RMS_GAIN{NO, NO, YES, NO}, LAYER_BIAS{YES, YES, YES, NO}, ANY_CONVENTION{ASK, ASK, ASK, ASK};

// gain * normalized + bias, with the roundings of the cast order
template <Convention K, class T> static inline T value(const Norm& norm, Statistics s, const float* h, Index j) {
    T v = s.normalized<K.layer != NO, T>(h + j);
    if (K.rounds != NO) v = rounded<T>(v, norm.round_normalized);
    if (known(K.gain, norm.gain)) v *= at<T>(norm.gain + j);
    if (K.rounds != NO) v = rounded<T>(v, norm.round_product);
    return known(K.bias, norm.bias) ? v + at<T>(norm.bias + j) : v;
}

// What the loop that makes h sums up for the statistics: squares, or for the mean of a LayerNorm the numbers themselves.
template <Convention K, class T> static inline T term(const Norm& norm, T v) { return known(K.layer, norm.kind == LAYER) ? v : v * v; }

static Statistics statistics(const Norm& norm, Total terms, const float* h, Index n, Ahead& ahead) {
    if (norm.kind == RMS) return {0, 1 / std::sqrt(terms.value() / n + norm.eps)};
    const float mean = terms.value() / n;
    Total squares;
    each(n, ahead, [&]<class T>(Index j, T) { const T v = at<T>(h + j) - mean; squares.add(v * v); });
    return {mean, 1 / std::sqrt(squares.value() / n + norm.eps)};
}

// The derivative of a norm, in two loops over the row: the first adds up, the second has the result. The buffer keeps
// gain times gradient from the one to the other; gradients of gain and bias are added to theirs.
struct Derivative {
    const Norm norm;
    const Statistics s;
    const float* h;
    float *buffer, *d_gain, *d_bias;
    Total along, level;
    float slope = 0, mean = 0;

    template <Convention K, class T> void first(T gradient, Index j) {
        const T v = s.normalized<K.layer != NO, T>(h + j);
        if (known(K.bias, d_bias)) set(d_bias + j, at<T>(d_bias + j) + gradient);
        if (known(K.gain, d_gain)) set(d_gain + j, at<T>(d_gain + j) + gradient * (K.rounds == NO ? v : rounded<T>(v, norm.round_normalized)));
        const T scaled = known(K.gain, norm.gain) ? gradient * at<T>(norm.gain + j) : gradient;
        set(buffer + j, scaled);
        along.add(scaled * v);
        if (K.layer != NO) level.add(scaled);
    }
    void add_up(Index n) {
        slope = s.rstd * s.rstd * along.value() / n;
        mean = norm.kind == LAYER ? s.rstd * level.value() / n : 0;
    }
    template <Convention K, class T> T second(Index j) const {
        const T scaled = s.rstd * at<T>(buffer + j);
        return K.layer == NO ? scaled - slope * at<T>(h + j) : scaled - mean - slope * (at<T>(h + j) - s.mean);
    }
};

// ---------------------------------------------------------------------------------------------- the junction

struct Numbers { double alpha, second, eps[SLOTS], scale, read_scale; };

constexpr int PARAMETERS = 9;  // gain and bias of each slot, then c
constexpr int C = 8;

// In the order in which cpu.py writes it.
struct Arguments {
    int64_t rows, width, threads, large;
    int64_t n_streams, has_state, has_z, kind[SLOTS], zero_centered[SLOTS], round_normalized[SLOTS], round_product[SLOTS];
    Tensor update, x, y, parameters[PARAMETERS];
    Tensor x_out, y_out, z, raw_x;  // forward: what it writes; backward: the gradients that arrive, and in y and raw_x what was saved
    float* stats;
    Tensor d_update, d_x, d_y;
    float *d_parameters, *partials;
    int64_t n_blocks;
};

// Which parts a junction has.
struct Shape {
    Known state, two, out, x, y, in, c, z, f32;
    bool fits(const Arguments& a) const {
        const bool norms[SLOTS] = {a.kind[OUT] != NONE, a.kind[X] != NONE, a.kind[Y] != NONE, a.kind[IN] != NONE};
        const Known slots[SLOTS] = {out, x, y, in};
        for (int s = 0; s < SLOTS; s++) if (known(slots[s], norms[s]) != norms[s]) return false;
        const bool has_c = bool(a.parameters[8]);
        bool only_f32 = true;
        for (Tensor t : {a.update, a.x, a.y, a.x_out, a.y_out, a.z, a.raw_x, a.d_update, a.d_x, a.d_y}) only_f32 &= !t || t.dtype == F32;
        return known(f32, only_f32) == only_f32 && known(z, bool(a.z)) == bool(a.z) && known(state, a.has_state) == bool(a.has_state) && known(two, a.n_streams == 2) == (a.n_streams == 2) && known(c, has_c) == has_c;
    }
};
//                            state two  out  x    y    in   c    z    f32
constexpr Shape PRE_F32     = {YES, NO,  NO,  NO,  NO,  YES, NO,  YES, YES};
constexpr Shape PRE         = {YES, NO,  NO,  NO,  NO,  YES, NO,  YES, ASK};
constexpr Shape POST        = {YES, NO,  NO,  YES, NO,  NO,  NO,  NO,  ASK};
constexpr Shape KEEL        = {YES, NO,  NO,  YES, NO,  YES, NO,  YES, ASK};
constexpr Shape PERI        = {YES, NO,  YES, NO,  NO,  YES, NO,  YES, ASK};
constexpr Shape OUTPUT      = {YES, NO,  YES, NO,  NO,  NO,  NO,  NO,  ASK};
constexpr Shape RESIDUAL    = {YES, YES, NO,  YES, NO,  NO,  NO,  NO,  ASK};
constexpr Shape SIAMESE_F32 = {YES, YES, NO,  YES, YES, YES, NO,  YES, YES};
constexpr Shape SIAMESE     = {YES, YES, NO,  YES, YES, YES, NO,  YES, ASK};
constexpr Shape HYBRID      = {YES, YES, NO,  NO,  YES, NO,  YES, YES, ASK};
constexpr Shape ANY_SHAPE   = {ASK, ASK, ASK, ASK, ASK, ASK, ASK, ASK, ASK};

constexpr int BUFFERS = 6;

// From one row of a buffer to the next: whole vectors, and no multiple of 4 KiB, which would put all rows in the same cache lines.
static Index stride_of(Index width) { return (width + LANES - 1) / LANES * LANES + 5 * LANES; }

struct Junction {
    const Arguments& a;
    const Index n, stride;
    const float alpha, second, scale, read_scale;
    float *storage, *zeros;
    const float* values[PARAMETERS] = {};  // in float32, zero-centred gains with their 1; null where there is none
    int place[PARAMETERS], n_parameters = 0, n_stats = 0;  // place: row of the parameter's gradient, -1 if none
    Norm norms[SLOTS];

    Junction(const Arguments& a, const Numbers& numbers)
        : a(a), n(a.width), stride(stride_of(a.width)), alpha(numbers.alpha),
          second(numbers.second), scale(numbers.scale), read_scale(numbers.read_scale) {
        storage = (float*)aligned_alloc(64, (PARAMETERS + 1) * stride * sizeof(float));
        zeros = storage + PARAMETERS * stride;
        memset(zeros, 0, stride * sizeof(float));
        for (int p = 0; p < PARAMETERS; p++) {
            place[p] = a.parameters[p] ? n_parameters++ : -1;
            if (!a.parameters[p]) continue;
            float* value = storage + p * stride;
            const float* from = ::read(a.parameters[p], 0, n, value);
            const float one = p < C && p % 2 == 0 && a.zero_centered[p / 2] ? 1 : 0;
            for (Index j = 0; j < n; j++) value[j] = one + from[j];
            values[p] = value;
        }
        for (int s = 0; s < SLOTS; s++) {
            norms[s] = {a.kind[s], a.round_normalized[s], a.round_product[s], float(numbers.eps[s]), values[2 * s], values[2 * s + 1]};
            n_stats += a.kind[s];
        }
    }
    ~Junction() { free(storage); }

    bool has(Slot slot) const { return norms[slot].kind != NONE; }
    bool fits(Convention convention) const { return convention.fits(norms[OUT]) && convention.fits(norms[X]) && convention.fits(norms[Y]) && convention.fits(norms[IN]); }
    Statistics statistics(Slot slot, Total terms, const float* h, float*& stats, Ahead& ahead) const {
        const Statistics s = ::statistics(norms[slot], terms, h, n, ahead);
        if (norms[slot].kind == LAYER) *stats++ = s.mean;
        *stats++ = s.rstd;
        return s;
    }

    void saved_statistics(Index row, Statistics* s) const {
        const float* stats = a.stats + row * n_stats;
        for (int slot = 0; slot < SLOTS; slot++) {
            s[slot] = {norms[slot].kind == LAYER ? *stats++ : 0, 1};
            if (has(Slot(slot))) s[slot].rstd = *stats++;
        }
    }

    Derivative derivative(Slot slot, Statistics s, const float* h, float* buffer, float* partial) const {
        const int gain = place[2 * slot], bias = place[2 * slot + 1];
        return {norms[slot], s, h, buffer, gain < 0 ? nullptr : partial + gain * stride, bias < 0 ? nullptr : partial + bias * stride};
    }

    template <Shape S> Row row_of(Tensor t, Index row) const { return {t, row, n, bool(a.large), S.f32}; }
    template <Shape S> Source source(Tensor t, Index row) const {
        const int64_t dtype = S.f32 == YES ? F32 : t.dtype;
        return t ? Source{t.data + row * n * (dtype == F32 ? 4 : 2), dtype} : Source{(const char*)zeros, F32};
    }
    template <Shape S> const float* read(Tensor t, Index row, float* buffer) const {
        return S.f32 == YES ? (const float*)t.data + row * n : ::read(t, row, n, buffer);
    }

    template <Shape S, Convention K> void forward(Index row, float** buffers) const {
        Ahead ahead;
        if (row + 1 < a.rows) for (Tensor t : {a.update, a.x, a.y}) ahead.add(t, row + 1, n);
        float* stats = a.stats + row * n_stats;
        const float alpha = this->alpha, second = this->second, scale = this->scale, read_scale = this->read_scale, *c = values[C];
        const Norm norm_out = norms[OUT], norm_x = norms[X], norm_y = norms[Y], norm_in = norms[IN];
        const bool two = known(S.two, a.n_streams == 2), has_x = known(S.x, has(X)), has_y = known(S.y, has(Y)), has_in = known(S.in, has(IN));
        const bool has_state = known(S.state, a.has_state), has_out = known(S.out, has(OUT)), has_c = known(S.c, c);

        Source u = source<S>(a.update, row);
        if (has_out) {
            const float* o = read<S>(a.update, row, buffers[0]);
            Total terms;
            each(n, ahead, [&]<class T>(Index j, T) { terms.add(term<K>(norm_out, at<T>(o + j))); });
            const Statistics s = statistics(OUT, terms, o, stats, ahead);
            float* to = buffers[0];
            each(n, ahead, [=]<class T>(Index j, T) { set(to + j, value<K, T>(norm_out, s, o, j)); });
            u = {(const char*)to, F32};
        }

        float *h = buffers[1], *y_out = buffers[2];
        const Source x = source<S>(a.x, row), y = source<S>(a.y, row);
        const Row h_row = row_of<S>(has_x ? a.raw_x : a.x_out, row), y_row = row_of<S>(a.y_out, row);
        Total terms_x, terms_y, terms_in;
        each(n, ahead, [&]<class T>(Index j, T t) {
            const T o = u.number(j, t), v = has_state ? alpha * x.number(j, t) + scale * o : scale * o;
            set(h + j, v);
            h_row.put(j, v);
            terms_x.add(term<K>(norm_x, v));
            if (!two) return;
            const T v_y = has_state ? y.number(j, t) + second * o : second * o;
            set(y_out + j, v_y);
            y_row.put(j, v_y);
            terms_y.add(term<K>(norm_y, v_y));
        });

        const Statistics s_x = has_x ? statistics(X, terms_x, h, stats, ahead) : Statistics{};
        const Statistics s_y = has_y ? statistics(Y, terms_y, y_out, stats, ahead) : Statistics{};
        const Row x_row = row_of<S>(has_x ? a.x_out : Tensor{}, row);
        float* w = buffers[3];
        each(n, ahead, [&]<class T>(Index j, T) {
            T v = at<T>(h + j);
            if (has_x) x_row.put(j, v = value<K, T>(norm_x, s_x, h, j));
            if (has_c) v *= at<T>(c + j);
            if (has_y) v += value<K, T>(norm_y, s_y, y_out, j);
            set(w + j, v);
            terms_in.add(term<K>(norm_in, v));
        });

        const Statistics s_in = has_in ? statistics(IN, terms_in, w, stats, ahead) : Statistics{};
        const Row z_row = row_of<S>(a.z, row);
        if (known(S.z, a.has_z)) each(n, ahead, [=]<class T>(Index j, T) {
            z_row.put(j, read_scale * (has_in ? value<K, T>(norm_in, s_in, w, j) : at<T>(w + j)));
        });
    }

    // z once more, from what the forward pass saved
    template <Shape S, Convention K> void rebuild(Index row, float** buffers) const {
        const float read_scale = this->read_scale, *c = values[C];
        const Norm norm_x = norms[X], norm_y = norms[Y], norm_in = norms[IN];
        const bool has_x = known(S.x, has(X)), has_y = known(S.y, has(Y)), has_in = known(S.in, has(IN)), has_c = known(S.c, c);
        Statistics s[SLOTS];
        saved_statistics(row, s);
        const Statistics s_x = s[X], s_y = s[Y], s_in = s[IN];
        const float* h = read<S>(a.raw_x, row, buffers[0]);
        const float* y_out = has_y ? read<S>(a.y, row, buffers[1]) : nullptr;
        const Row z_row = row_of<S>(a.z, row);
        float* w = buffers[2];
        Ahead ahead;
        each(n, ahead, [=]<class T>(Index j, T) {
            T v = has_x ? value<K, T>(norm_x, s_x, h, j) : at<T>(h + j);
            if (has_c) v *= at<T>(c + j);
            if (has_y) v += value<K, T>(norm_y, s_y, y_out, j);
            set(w + j, v);
            z_row.put(j, read_scale * (has_in ? value<K, T>(norm_in, s_in, w, j) : v));
        });
    }

    template <Shape S, Convention K> void backward(Index row, float** buffers, float* partial) const {
        Ahead ahead;
        if (row + 1 < a.rows) for (Tensor t : {a.update, a.y_out, a.x_out, a.z, a.y, a.raw_x}) ahead.add(t, row + 1, n);
        const float alpha = this->alpha, second = this->second, scale = this->scale, read_scale = this->read_scale, *c = values[C];
        const Norm norm_x = norms[X], norm_y = norms[Y];
        const bool two = known(S.two, a.n_streams == 2), has_x = known(S.x, has(X)), has_y = known(S.y, has(Y)), has_in = known(S.in, has(IN));
        const bool has_out = known(S.out, has(OUT)), has_c = known(S.c, c);
        Statistics s[SLOTS];
        saved_statistics(row, s);
        const Statistics s_x = s[X], s_y = s[Y];
        const float* h = read<S>(a.raw_x, row, buffers[0]);
        const float* y_out = has_y ? read<S>(a.y, row, buffers[1]) : nullptr;
        const auto x_out = [=]<class T>(Index j, T) { return has_x ? value<K, T>(norm_x, s_x, h, j) : at<T>(h + j); };

        // w, which N_in sees, is made again; d_w is its gradient.
        const bool has_d_z = known(S.z, a.has_z && a.z), sums = has_x || has_y;
        const Source d_z = source<S>(a.z, row);
        float* w = buffers[3];
        Derivative of_in = derivative(IN, s[IN], sums ? w : h, buffers[2], partial);
        if (has_d_z && has_in) {
            each(n, ahead, [&]<class T>(Index j, T t) {
                if (sums) {
                    T v = x_out(j, t);
                    if (has_c) v *= at<T>(c + j);
                    if (has_y) v += value<K, T>(norm_y, s_y, y_out, j);
                    set(w + j, v);
                }
                of_in.first<K>(T(read_scale * d_z.number(j, t)), j);
            });
            of_in.add_up(n);
        }
        const auto d_w = [&]<class T>(Index j, T t) { return has_in ? of_in.second<K, T>(j) : read_scale * d_z.number(j, t); };

        const Source d_x_out = source<S>(a.x_out, row), d_y_out = source<S>(two ? a.y_out : Tensor{}, row);
        float *d_h = buffers[4], *d_y = buffers[5], *d_c = has_c ? partial + place[C] * stride : nullptr;
        Derivative of_x = derivative(X, s_x, h, d_h, partial), of_y = derivative(Y, s_y, y_out, d_y, partial);
        each(n, ahead, [&]<class T>(Index j, T t) {
            T to_x = d_x_out.number(j, t);
            if (has_d_z) {
                const T v = d_w(j, t);
                to_x += has_c ? at<T>(c + j) * v : v;
                if (has_c) set(d_c + j, at<T>(d_c + j) + v * x_out(j, t));
                if (has_y) of_y.first<K>(v, j);
            }
            if (has_x) of_x.first<K>(to_x, j);
            else set(d_h + j, to_x);
        });
        of_x.add_up(n);
        of_y.add_up(n);

        const bool from_y = has_d_z && has_y;
        float* d_u = buffers[3];
        const Row d_x_row = row_of<S>(a.d_x, row), d_y_row = row_of<S>(a.d_y, row), d_u_row = row_of<S>(has_out ? Tensor{} : a.d_update, row);
        each(n, ahead, [&]<class T>(Index j, T t) {
            const T v = has_x ? of_x.second<K, T>(j) : at<T>(d_h + j);
            d_x_row.put(j, alpha * v);
            T to_u = scale * v;
            if (two) {
                T v_y = d_y_out.number(j, t);
                if (from_y) v_y += of_y.second<K, T>(j);
                d_y_row.put(j, v_y);
                to_u += second * v_y;
            }
            d_u_row.put(j, to_u);
            if (has_out) set(d_u + j, to_u);
        });

        if (!has_out) return;
        const float* o = read<S>(a.update, row, buffers[0]);
        const Row to = row_of<S>(a.d_update, row);
        Derivative of_o = derivative(OUT, s[OUT], o, d_u, partial);
        each(n, ahead, [&]<class T>(Index j, T) { of_o.first<K>(at<T>(d_u + j), j); });
        of_o.add_up(n);
        each(n, ahead, [&]<class T>(Index j, T) { to.put(j, of_o.second<K, T>(j)); });
    }
};

struct Buffers {
    float* rows[BUFFERS];
    explicit Buffers(Index stride) {
        rows[0] = (float*)aligned_alloc(64, BUFFERS * stride * sizeof(float));
        for (int k = 1; k < BUFFERS; k++) rows[k] = rows[0] + k * stride;
    }
    ~Buffers() { free(rows[0]); }
};

static void finish_writes(bool past_cache) {
#if defined(__AVX512F__)
    if (past_cache) _mm_sfence();
#endif
}

using Forward = void (Junction::*)(Index, float**) const;
using Backward = void (Junction::*)(Index, float**, float*) const;
struct Code { Shape shape; Convention convention; Forward forward, rebuild; Backward backward; };
template <Shape S, Convention K> constexpr Code code{S, K, &Junction::forward<S, K>, &Junction::rebuild<S, K>, &Junction::backward<S, K>};

// The first that fits is taken: what is frequent is compiled by itself, without a branch in its loops.
constexpr Code CODES[] = {
    code<PRE_F32, RMS_GAIN>, code<SIAMESE_F32, RMS_GAIN>, code<PRE, RMS_GAIN>, code<POST, RMS_GAIN>, code<KEEL, RMS_GAIN>,
    code<PERI, RMS_GAIN>, code<OUTPUT, RMS_GAIN>, code<RESIDUAL, RMS_GAIN>, code<SIAMESE, RMS_GAIN>, code<HYBRID, RMS_GAIN>,
    code<PRE, LAYER_BIAS>, code<POST, LAYER_BIAS>, code<SIAMESE, LAYER_BIAS>,
    code<ANY_SHAPE, ANY_CONVENTION>,
};

static_assert(sizeof(Arguments) == 8 * (4 + 19 + 42), "cpu.py packs so many");

static const Code& code_for(const Junction& junction) {
    for (const Code& code : CODES) if (code.shape.fits(junction.a) && junction.fits(code.convention)) return code;
    abort();  // the last one fits everything
}

extern "C" int64_t normstream_stride(int64_t width) { return stride_of(width); }

static void for_each_row(const Junction& junction, Forward forward) {
    const Arguments* a = &junction.a;
#pragma omp parallel num_threads(int(a->threads)) if (a->threads > 1)
    {
        Buffers buffers(junction.stride);
#pragma omp for schedule(static)
        for (Index row = 0; row < a->rows; row++) (junction.*forward)(row, buffers.rows);
        finish_writes(a->large);
    }
}

extern "C" void normstream_junction(const Arguments* a, const Numbers* numbers) {
    const Junction junction(*a, *numbers);
    for_each_row(junction, code_for(junction).forward);
}

extern "C" void normstream_junction_z(const Arguments* a, const Numbers* numbers) {
    const Junction junction(*a, *numbers);
    for_each_row(junction, code_for(junction).rebuild);
}

extern "C" void normstream_junction_backward(const Arguments* a, const Numbers* numbers) {
    const Junction junction(*a, *numbers);
    const Index size = junction.n_parameters * junction.stride, n_blocks = a->n_blocks;
    const Backward backward = code_for(junction).backward;
#pragma omp parallel num_threads(int(a->threads)) if (a->threads > 1)
    {
        Buffers buffers(junction.stride);
#pragma omp for schedule(static)
        for (Index block = 0; block < n_blocks; block++) {
            float* partial = a->partials + block * size;
            memset(partial, 0, size * sizeof(float));
            for (Index row = a->rows * block / n_blocks; row < a->rows * (block + 1) / n_blocks; row++)
                (junction.*backward)(row, buffers.rows, partial);
        }
        finish_writes(a->large);
#pragma omp for schedule(static)
        for (int p = 0; p < junction.n_parameters; p++)
            for (Index j = 0; j < a->width; j++) {
                double gradient = 0;
                for (Index block = 0; block < n_blocks; block++) gradient += a->partials[block * size + p * junction.stride + j];
                a->d_parameters[p * a->width + j] = gradient;
            }
    }
}
