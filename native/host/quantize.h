// Rows converted on their way into and out of a quantised cache. include/kvbm_kernels.h has the definition.
#pragma once

#include "host/rows.h"
#include "token_rows.h"

namespace kvbm::host {

// Converts rows.count rows; of the rest of `rows` only the places and strides count.
using ConvertRows = void (*)(const Rows &rows, const RowFormat &format);

// From rows as they are given to rows as they are stored.
ConvertRows choose_quantize(const RowFormat &format);
// The other way.
ConvertRows choose_dequantize(const RowFormat &format);

// For any processor, and for those that have AVX2 and F16C. Their results are the same.
ConvertRows portable_quantize(const RowFormat &format);
ConvertRows portable_dequantize(const RowFormat &format);
#ifdef __x86_64__
bool has_avx2_and_f16c();
ConvertRows avx2_quantize(const RowFormat &format);
ConvertRows avx2_dequantize(const RowFormat &format);
#endif

}  // namespace kvbm::host
