/* A gated MLP on a GPU from C: weights and activations in device memory, the product on a stream of the program's.
 *
 *   cargo build --release -p dualgemm-capi
 *   cc -Icrates/capi/include examples/c/device.c -Ltarget/release -ldualgemm_c -lm -ldl -o device
 *   LD_LIBRARY_PATH=target/release ./device cuda:0
 *
 * It needs a driver and no toolkit. With "sim:sm_90a" it runs on a simulated H100. The result is compared with the
 * definition, in double.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dualgemm.h"

#define CHECK(call)                                                \
    do {                                                           \
        if ((call) != DUALGEMM_STATUS_OK) {                        \
            fprintf(stderr, "error: %s\n", dualgemm_last_error()); \
            return 1;                                              \
        }                                                          \
    } while (0)

enum { M = 5, N = 80, K = 96 };

/* An nvfp4 matrix of K columns on the host. */
typedef struct {
    size_t rows;
    uint8_t codes[N * K / 2], scales[N * K / 16];
    float global_scale;
} nvfp4;

static void fill(nvfp4 *m, size_t rows, unsigned seed) {
    m->rows = rows;
    m->global_scale = 0.0625f * (float)(seed + 1);
    for (size_t i = 0; i < rows * K / 2; i++) m->codes[i] = (uint8_t)(i * 37 + seed * 91 + i / 7);
    for (size_t i = 0; i < rows * K / 16; i++) m->scales[i] = (uint8_t)(0x28 + (i * 5 + seed) % 24);
}

/* What a code and its block scale stand for. */
static double value(const nvfp4 *m, size_t row, size_t k) {
    static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    unsigned code = m->codes[(row * K + k) / 2] >> (k % 2 * 4) & 15;
    unsigned scale = m->scales[(row * K + k) / 16];
    double e4m3 = ldexp(1 + (scale & 7) / 8.0, (int)(scale >> 3) - 7);
    return (code & 8 ? -e2m1[code & 7] : e2m1[code]) * e4m3 * m->global_scale;
}

static double dot(const nvfp4 *a, size_t row, const nvfp4 *b, size_t feature) {
    double sum = 0;
    for (size_t k = 0; k < K; k++) sum += value(a, row, k) * value(b, feature, k);
    return sum;
}

/* The matrix in device memory. */
static dualgemm_status upload(const char *target, const nvfp4 *m, dualgemm_matrix *out) {
    size_t codes = m->rows * K / 2, scales = m->rows * K / 16;
    void *to[2];
    dualgemm_status status = dualgemm_device_alloc(target, codes, &to[0]);
    if (!status) status = dualgemm_device_alloc(target, scales, &to[1]);
    if (!status) status = dualgemm_device_write(target, to[0], m->codes, codes);
    if (!status) status = dualgemm_device_write(target, to[1], m->scales, scales);
    memset(out, 0, sizeof *out);
    out->format = DUALGEMM_FORMAT_NVFP4;
    out->rows = m->rows;
    out->k = K;
    out->data = to[0];
    out->scales = (const uint8_t *)to[1];
    out->global_scale = m->global_scale;
    return status;
}

/* A stream of our own, as an engine has; null, the default one, where there is no CUDA. */
static void *new_stream(void *driver) {
    int (*create)(void **, unsigned) = NULL;
    void *stream = NULL;
    if (driver) *(void **)&create = dlsym(driver, "cuStreamCreate");
    return create && create(&stream, 1) == 0 ? stream : NULL;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: device cuda:N | sim:sm_90a\n");
        return 2;
    }
    const char *target = argv[1];
    static nvfp4 gate, up, a;
    fill(&gate, N, 0);
    fill(&up, N, 1);
    fill(&a, M, 2);
    dualgemm_matrix on_device[3];
    CHECK(upload(target, &gate, &on_device[0]));
    CHECK(upload(target, &up, &on_device[1]));
    CHECK(upload(target, &a, &on_device[2]));

    /* The library has made the GPU's primary context current by now. */
    void *driver = strncmp(target, "cuda", 4) ? NULL : dlopen("libcuda.so.1", RTLD_NOW);
    void *stream = new_stream(driver);
    fprintf(stderr, "%s\n", stream ? "a stream of our own" : "the default stream");

    dualgemm_weights *weights;
    CHECK(dualgemm_weights_from_device(target, &on_device[0], &on_device[1], stream, &weights));
    for (int i = 0; i < 2; i++) {
        CHECK(dualgemm_device_free(target, (void *)on_device[i].data));
        CHECK(dualgemm_device_free(target, (void *)on_device[i].scales));
    }

    dualgemm_desc desc = {0};
    desc.m = 16;
    desc.a_format = DUALGEMM_FORMAT_NVFP4;
    desc.c_format = DUALGEMM_FORMAT_F32;
    dualgemm_plan *plan;
    CHECK(dualgemm_plan_new(&desc, weights, &plan));
    fprintf(stderr, "%s\n", dualgemm_plan_text(plan));
    CHECK(dualgemm_plan_warm(plan, weights, stream));

    void *c;
    CHECK(dualgemm_device_alloc(target, M * N * sizeof(float), &c));
    for (int call = 0; call < 3; call++)
        CHECK(dualgemm_run(plan, &on_device[2], weights, c, NULL, NULL, stream));
    CHECK(dualgemm_device_synchronize(target));
    static float got[M * N];
    CHECK(dualgemm_device_read(target, got, c, sizeof got));

    double off = 0, all = 0;
    for (size_t row = 0; row < M; row++) {
        for (size_t feature = 0; feature < N; feature++) {
            double g = dot(&a, row, &gate, feature), u = dot(&a, row, &up, feature);
            double want = g / (1 + exp(-g)) * u, error = got[row * N + feature] - want;
            off += error * error;
            all += want * want;
        }
    }
    double error = sqrt(off / all);
    printf("relative error %.2e\n", error);

    CHECK(dualgemm_device_free(target, c));
    CHECK(dualgemm_device_free(target, (void *)on_device[2].data));
    CHECK(dualgemm_device_free(target, (void *)on_device[2].scales));
    dualgemm_plan_free(plan);
    dualgemm_weights_free(weights);
    return error < 1e-5 ? 0 : 1;
}
