/* Block stacks to universal blocks and back on the host engine, and what the stream functions answer in this build. */
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "kvbm_kernels.h"

enum { NB = 3, NH = 4, NL = 2, NO = 2, NT = 3, HD = 5, BYTES = 2, ROW = HD * BYTES };

typedef unsigned char chunk[NT * NH * ROW];
typedef unsigned char universal_block[NH][NL][NO][NT][ROW];

static chunk chunks[NB * NL * NO], restored[NB * NL * NO];
static universal_block universals[NB];

static void convert(int layout) {
  const void *block_ptrs[NB * NL * NO];
  void *restored_ptrs[NB * NL * NO];
  void *universal_ptrs[NB];
  int b, l, o, t, h, i;

  for (i = 0; i < NB * NL * NO; i++) {
    size_t j;
    for (j = 0; j < sizeof(chunk); j++) chunks[i][j] = (unsigned char)(i * 131 + j * 7 + j / 256);
    block_ptrs[i] = chunks[i];
    restored_ptrs[i] = restored[i];
  }
  for (b = 0; b < NB; b++) universal_ptrs[b] = universals[b];
  memset(universals, 0, sizeof universals);
  memset(restored, 0, sizeof restored);

  CHECK(kvbm_kernels_host_universal_from_block(universal_ptrs, block_ptrs, NB, NH, NL, NO, NT, HD,
                                               KVBM_KERNELS_DTYPE_F16, layout, 1) == KVBM_KERNELS_SUCCESS);
  for (b = 0; b < NB; b++)
    for (l = 0; l < NL; l++)
      for (o = 0; o < NO; o++)
        for (t = 0; t < NT; t++)
          for (h = 0; h < NH; h++) {
            const int row = layout == KVBM_KERNELS_LAYOUT_NHD ? t * NH + h : h * NT + t;
            for (i = 0; i < ROW; i++)
              CHECK(universals[b][h][l][o][t][i] == chunks[(b * NL + l) * NO + o][row * ROW + i]);
          }

  CHECK(kvbm_kernels_host_block_from_universal((const void *const *)universal_ptrs, restored_ptrs, NB, NH, NL, NO, NT,
                                               HD, KVBM_KERNELS_DTYPE_F16, layout, 0) == KVBM_KERNELS_SUCCESS);
  CHECK(memcmp(restored, chunks, sizeof chunks) == 0);
  printf("%s -> universal -> %s: %d blocks equal\n", layout ? "HND" : "NHD", layout ? "HND" : "NHD", NB);
}

static void show(const char *call, int status) {
  printf("%s: %d %s: %s\n", call, status, kvbm_kernels_status_name(status), kvbm_kernels_last_error_message());
}

static void ask_the_stream_functions(void) {
  const char from[16] = "sixteen bytes  ";
  char to[16] = "";
  const void *src[1];
  void *dst[1];
  kvbm_kernels_build_info info = {sizeof info, NULL, NULL, 0, 0, 0, false};
  int status;

  CHECK(kvbm_kernels_get_build_info(&info) == 0);
  printf("version %s, %s, architectures \"%s\", driver %d, %d devices\n", info.version,
         info.is_stub_build ? "stub" : "CUDA", info.cuda_archs, info.driver_version, info.num_devices);
  CHECK(info.is_stub_build == kvbm_kernels_is_stub_build());

  /* An argument that no build accepts. */
  status = kvbm_kernels_launch_universal_from_block(NULL, NULL, 1, 1, 1, 1, 1, 1, KVBM_KERNELS_DTYPE_F16, 7, NULL);
  show("launch_universal_from_block", status);
  CHECK(status == KVBM_KERNELS_ERROR_INVALID_VALUE);
  CHECK(strstr(kvbm_kernels_last_error_message(), "layout_value is 7") != NULL);

  /* Real work, on memory that needs no CUDA to get. */
  src[0] = from;
  dst[0] = to;
  status = kvbm_kernels_memcpy_batch(src, dst, sizeof to, 1, KVBM_KERNELS_MODE_AUTO, NULL);
  if (info.num_devices > 0) {
    CHECK(status == KVBM_KERNELS_SUCCESS);
    CHECK(memcmp(from, to, sizeof to) == 0);
    printf("memcpy_batch: 0\n");
  } else {
    show("memcpy_batch", status);
    CHECK(status != KVBM_KERNELS_SUCCESS);
    CHECK((status == KVBM_KERNELS_ERROR_STUB_LIBRARY) == info.is_stub_build);
    CHECK(kvbm_kernels_last_error_message()[0] != '\0');
    CHECK(to[0] == '\0');
  }
}

int main(void) {
  convert(KVBM_KERNELS_LAYOUT_NHD);
  convert(KVBM_KERNELS_LAYOUT_HND);
  ask_the_stream_functions();
  return 0;
}
