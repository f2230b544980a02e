/* A layer of a checkpoint from C, gate and up, the whole MLP or a linear layer by its name: prepack, plan, run.
 *
 *   cargo build --release -p dualgemm-capi
 *   cc -Icrates/capi/include examples/c/layer.c -Ltarget/release -ldualgemm_c -o layer
 *   LD_LIBRARY_PATH=target/release ./layer testdata/smollm2-135m-layer14/modelopt-nvfp4 [mlp | MODULE]
 */
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

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: layer CHECKPOINT [mlp | MODULE]\n");
        return 2;
    }
    dualgemm_weights *weights;
    if (argc == 2)
        CHECK(dualgemm_weights_from_checkpoint("cpu", argv[1], 0, 0, 1, &weights));
    else if (!strcmp(argv[2], "mlp"))
        CHECK(dualgemm_mlp_from_checkpoint("cpu", argv[1], 0, &weights));
    else
        CHECK(dualgemm_linear_from_checkpoint("cpu", argv[1], argv[2], &weights));
    size_t m = 4, n, k;
    CHECK(dualgemm_weights_shape(weights, &n, &k));

    dualgemm_desc desc = {0};
    desc.m = m;
    desc.a_format = DUALGEMM_FORMAT_F32;
    desc.c_format = DUALGEMM_FORMAT_F32;
    desc.between_format = DUALGEMM_FORMAT_F32;
    dualgemm_plan *plan;
    CHECK(dualgemm_plan_new(&desc, weights, &plan));
    fprintf(stderr, "%s\n", dualgemm_plan_text(plan));

    float *a = (float *)malloc(m * k * sizeof *a), *c = (float *)malloc(m * n * sizeof *c);
    if (!a || !c) return 1;
    for (size_t i = 0; i < m * k; i++) a[i] = (float)(i % 23) / 8 - 1;
    dualgemm_matrix matrix = {0};
    matrix.format = DUALGEMM_FORMAT_F32;
    matrix.rows = m;
    matrix.k = k;
    matrix.data = a;
    CHECK(dualgemm_run(plan, &matrix, weights, c, NULL, NULL, NULL));

    for (size_t row = 0; row < m; row++) {
        for (size_t col = 0; col < n; col++) printf("%.9g ", c[row * n + col]);
        printf("\n");
    }
    free(a);
    free(c);
    dualgemm_plan_free(plan);
    dualgemm_weights_free(weights);
    return 0;
}
