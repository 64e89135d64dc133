// The plan by itself: what merges, what does not, and that what is left still names every row once.
#include <algorithm>
#include <cstdio>
#include <random>
#include <tuple>
#include <vector>

#include "plan.h"

namespace {

using kvbm::Plan;
using Shape = kvbm_kernels_block_shape;
using View = kvbm_kernels_view;

int failures = 0;

void expect_equal(const char *what, long long actual, long long expected, int line) {
  if (actual == expected) return;
  std::printf("line %d: %s is %lld, expected %lld\n", line, what, actual, expected);
  ++failures;
}
#define EXPECT_EQ(actual, expected) \
  expect_equal(#actual, static_cast<long long>(actual), static_cast<long long>(expected), __LINE__)

constexpr size_t kBlocks = 5;
const Shape kShape{3, 2, 8, 16, 256};  // nl, no, nh, nt, row
constexpr size_t kChunk = 8 * 16 * 256;
constexpr size_t kBlock = 3 * 2 * kChunk;

// Tables that are never read: a plan is made from steps and strides.
void *const *const kTable = reinterpret_cast<void *const *>(uintptr_t{0x1000});

View stack(int layout) {
  View view;
  kvbm_kernels_block_stack_view(&view, kTable, kBlocks, &kShape, layout);
  return view;
}
View operational(int layout) {
  View view;
  kvbm_kernels_operational_view(&view, kTable, kBlocks, &kShape, layout);
  return view;
}
View universal() {
  View view;
  kvbm_kernels_universal_view(&view, kTable, kBlocks, &kShape);
  return view;
}
// One array for all blocks instead of one a block.
View one_array(View view) {
  view.base_block_step = 0;
  view.num_bases = 1;
  view.block_stride = kBlock;
  return view;
}
View with_ids(View view, const std::vector<int64_t> &ids) {
  view.block_ids = ids.data();
  return view;
}
Plan plan_of(const View &dst, const View &src) { return kvbm::make_plan(dst, src, kShape, kBlocks); }

void hnd_and_universal_meet_in_runs_of_tokens() {
  for (const Plan &plan : {plan_of(universal(), stack(1)), plan_of(stack(1), universal())}) {
    EXPECT_EQ(plan.segment_nbytes, 16 * 256);
    EXPECT_EQ(plan.num_dims, 1);
    EXPECT_EQ(plan.dims[0].size, 8);
    EXPECT_EQ(plan.num_items(), kBlocks * 3 * 2);
    EXPECT_EQ(plan.num_items() * plan.segments_per_item(), kBlocks * 3 * 2 * 8);
  }
}

void nhd_and_universal_meet_in_rows() {
  const Plan there = plan_of(universal(), stack(0));
  EXPECT_EQ(there.segment_nbytes, 256);
  EXPECT_EQ(there.num_dims, 2);
  // Tokens outside, heads inside: the chunk is walked in order.
  EXPECT_EQ(there.dims[0].size, 16);
  EXPECT_EQ(there.dims[0].src_stride, 8 * 256);
  EXPECT_EQ(there.dims[0].dst_stride, 256);
  EXPECT_EQ(there.dims[1].size, 8);
  EXPECT_EQ(there.dims[1].src_stride, 256);
  EXPECT_EQ(there.dims[1].dst_stride, 3 * 2 * 16 * 256);
  EXPECT_EQ(plan_of(stack(0), universal()).dims[0].size, 16);
}

void an_operational_block_and_its_own_stack_meet_in_chunks() {
  for (int layout : {0, 1}) {
    const Plan plan = plan_of(operational(layout), stack(layout));
    EXPECT_EQ(plan.segment_nbytes, kChunk);
    EXPECT_EQ(plan.num_dims, 0);
    EXPECT_EQ(plan.num_items(), kBlocks * 3 * 2);
  }
}

void the_same_layout_is_one_run() {
  for (const View &view : {operational(0), operational(1), universal()}) {
    const Plan separate = plan_of(view, view);
    EXPECT_EQ(separate.segment_nbytes, kBlock);
    EXPECT_EQ(separate.num_items(), kBlocks);
    const Plan together = plan_of(one_array(view), one_array(view));
    EXPECT_EQ(together.segment_nbytes, kBlocks * kBlock);
    EXPECT_EQ(together.num_items(), 1);
    EXPECT_EQ(together.num_dims, 0);
  }
}

void blocks_merge_only_where_both_sides_step_alike() {
  const std::vector<int64_t> forward{2, 3, 4, 5, 6}, forward_too{7, 8, 9, 10, 11}, gaps{0, 2, 4, 6, 8},
      backward{9, 8, 7, 6, 5}, mixed{2, 3, 5, 6, 7};
  const View blocks = one_array(universal());

  const Plan alike = plan_of(with_ids(blocks, forward), with_ids(blocks, forward_too));
  EXPECT_EQ(alike.segment_nbytes, kBlocks * kBlock);
  EXPECT_EQ(alike.dst.byte_offset(0, 0, 0), 2 * kBlock);
  EXPECT_EQ(alike.src.byte_offset(0, 0, 0), 7 * kBlock);

  // Every second block on both sides: an even step, but not one run.
  const Plan both_gaps = plan_of(with_ids(blocks, gaps), with_ids(blocks, gaps));
  EXPECT_EQ(both_gaps.segment_nbytes, kBlock);
  EXPECT_EQ(both_gaps.num_dims, 1);
  EXPECT_EQ(both_gaps.dims[0].src_stride, 2 * kBlock);

  const Plan one_gap = plan_of(with_ids(blocks, forward), with_ids(blocks, gaps));
  EXPECT_EQ(one_gap.segment_nbytes, kBlock);
  EXPECT_EQ(one_gap.dims[0].src_stride, 2 * kBlock);
  EXPECT_EQ(one_gap.dims[0].dst_stride, kBlock);

  const Plan against = plan_of(with_ids(blocks, forward), with_ids(blocks, backward));
  EXPECT_EQ(against.segment_nbytes, kBlock);
  EXPECT_EQ(against.dims[0].src_stride, -static_cast<int64_t>(kBlock));
  EXPECT_EQ(against.src.byte_offset(0, 0, 0), 9 * kBlock);

  const Plan uneven = plan_of(with_ids(blocks, mixed), with_ids(blocks, mixed));
  EXPECT_EQ(uneven.segment_nbytes, kBlock);
  EXPECT_EQ(uneven.num_items(), kBlocks);
  EXPECT_EQ(uneven.src.byte_offset(2, 0, 0), 5 * kBlock);

  // Even ids do not help where each block has a base of its own.
  EXPECT_EQ(plan_of(with_ids(universal(), forward), with_ids(blocks, forward)).num_items(), kBlocks);
}

void packed_rows_never_merge_over_what_lies_between() {
  View packed = stack(0);  // K and V of a token and head side by side: the row pitch is two rows
  packed.base_outer_step = 0;
  packed.base_layer_step = 1;
  packed.base_block_step = 3;
  packed.outer_stride = 256;
  packed.head_stride = 512;
  packed.token_stride = 8 * 512;
  const Plan plan = plan_of(stack(0), packed);
  EXPECT_EQ(plan.segment_nbytes, 256);
  // Tokens and heads are one walk on both sides, with a pitch on the source's.
  EXPECT_EQ(plan.num_dims, 1);
  EXPECT_EQ(plan.dims[0].size, 16 * 8);
  EXPECT_EQ(plan.dims[0].src_stride, 512);
  EXPECT_EQ(plan.dims[0].dst_stride, 256);
}

void the_alignment_is_what_every_address_shares() {
  EXPECT_EQ(plan_of(universal(), stack(0)).alignment, 16);
  for (size_t row : {1, 2, 4, 8, 12, 24, 48, 584, 656}) {
    const Shape shape{3, 2, 8, 16, row};
    View dst, src;
    kvbm_kernels_universal_view(&dst, kTable, kBlocks, &shape);
    kvbm_kernels_block_stack_view(&src, kTable, kBlocks, &shape, 0);
    EXPECT_EQ(kvbm::make_plan(dst, src, shape, kBlocks).alignment, std::min<size_t>(16, row & (0 - row)));
  }
  View shifted = stack(0);
  shifted.offset = 6;
  EXPECT_EQ(plan_of(universal(), shifted).alignment, 2);
  View padded = one_array(universal());
  padded.block_stride += 8;
  EXPECT_EQ(plan_of(universal(), padded).alignment, 8);
}

void rows_that_share_cache_lines_are_written_in_order() {
  const Shape shape{3, 2, 8, 16, 4};
  View dst, src;
  kvbm_kernels_universal_view(&dst, kTable, kBlocks, &shape);
  kvbm_kernels_block_stack_view(&src, kTable, kBlocks, &shape, 0);
  const Plan plan = kvbm::make_plan(dst, src, shape, kBlocks);
  EXPECT_EQ(plan.dims[plan.num_dims - 1].dst_stride, 4);
}

void sizes_past_32_bits_are_exact() {
  const size_t blocks = size_t{1} << 20;
  const Shape shape{128, 2, 64, 256, 1152};  // 2^42 rows, 2^52 bytes
  View dst, src;
  kvbm_kernels_universal_view(&dst, kTable, blocks, &shape);
  kvbm_kernels_block_stack_view(&src, kTable, blocks, &shape, 0);
  const Plan plan = kvbm::make_plan(dst, src, shape, blocks);
  EXPECT_EQ(plan.num_items(), blocks * 128 * 2);
  EXPECT_EQ(plan.num_items() * plan.segments_per_item(), blocks * 128 * 2 * 64 * 256);
  EXPECT_EQ(plan.total_nbytes(), blocks * 128 * 2 * 64 * 256 * 1152);
  EXPECT_EQ(plan.src.table_index(blocks - 1, 127, 1), blocks * 128 * 2 - 1);
  EXPECT_EQ(plan.dst.byte_offset(blocks - 1, 127, 1), (127 * 2 + 1) * int64_t{256} * 1152);
  EXPECT_EQ(plan.dims[1].dst_stride, int64_t{128} * 2 * 256 * 1152);

  // One array of 2^52 bytes on both sides is one run.
  View array = dst;
  array.base_block_step = 0;
  array.block_stride = int64_t{128} * 2 * 64 * 256 * 1152;
  const Plan run = kvbm::make_plan(array, array, shape, blocks);
  EXPECT_EQ(run.num_dims, 0);
  EXPECT_EQ(run.segment_nbytes, blocks * 128 * 2 * 64 * 256 * 1152);
}

// Table entry and byte offset of a row on both sides.
using Row = std::tuple<size_t, int64_t, size_t, int64_t>;

std::vector<Row> rows_by_definition(const View &dst, const View &src, const Shape &s, size_t num_blocks) {
  std::vector<Row> rows;
  const auto place = [](const View &v, size_t b, size_t l, size_t o, size_t t, size_t h) {
    const int64_t id = v.block_ids ? v.block_ids[b] : static_cast<int64_t>(b);
    return std::make_pair(static_cast<size_t>(id) * v.base_block_step + l * v.base_layer_step + o * v.base_outer_step,
                          v.offset + id * v.block_stride + static_cast<int64_t>(l) * v.layer_stride +
                              static_cast<int64_t>(o) * v.outer_stride + static_cast<int64_t>(t) * v.token_stride +
                              static_cast<int64_t>(h) * v.head_stride);
  };
  for (size_t b = 0; b < num_blocks; ++b)
    for (size_t l = 0; l < s.num_layers; ++l)
      for (size_t o = 0; o < s.num_outer; ++o)
        for (size_t t = 0; t < s.num_tokens; ++t)
          for (size_t h = 0; h < s.num_heads; ++h)
            rows.push_back(std::tuple_cat(place(dst, b, l, o, t, h), place(src, b, l, o, t, h)));
  std::sort(rows.begin(), rows.end());
  return rows;
}

std::vector<Row> rows_of_plan(const Plan &plan, size_t row_nbytes) {
  std::vector<Row> rows;
  for (size_t b = 0; b < plan.num_blocks; ++b)
    for (size_t l = 0; l < plan.num_layers; ++l)
      for (size_t o = 0; o < plan.num_outer; ++o)
        for (size_t segment = 0; segment < plan.segments_per_item(); ++segment) {
          int64_t dst = plan.dst.byte_offset(b, l, o), src = plan.src.byte_offset(b, l, o);
          size_t rest = segment;
          for (int i = plan.num_dims - 1; i >= 0; --i) {
            const auto index = static_cast<int64_t>(rest % plan.dims[i].size);
            rest /= plan.dims[i].size;
            dst += index * plan.dims[i].dst_stride;
            src += index * plan.dims[i].src_stride;
          }
          for (size_t at = 0; at < plan.segment_nbytes; at += row_nbytes) {
            rows.emplace_back(plan.dst.table_index(b, l, o), dst + static_cast<int64_t>(at),
                              plan.src.table_index(b, l, o), src + static_cast<int64_t>(at));
          }
        }
  std::sort(rows.begin(), rows.end());
  return rows;
}

void a_plan_names_every_row_once() {
  std::mt19937 random(7);
  const auto up_to = [&random](size_t n) { return random() % n + 1; };
  for (int round = 0; round < 3000; ++round) {
    const Shape shape{up_to(3), up_to(2), up_to(4), up_to(4), up_to(3) * 8};
    const size_t num_blocks = up_to(4), pool = num_blocks + random() % 3;
    std::vector<int64_t> ids[2];
    View views[2];
    for (int side = 0; side < 2; ++side) {
      View &view = views[side];
      switch (random() % 3) {
        case 0:
          kvbm_kernels_block_stack_view(&view, kTable, pool, &shape, static_cast<int>(random() % 2));
          break;
        case 1:
          kvbm_kernels_operational_view(&view, kTable, pool, &shape, static_cast<int>(random() % 2));
          break;
        default:
          kvbm_kernels_universal_view(&view, kTable, pool, &shape);
      }
      if (view.base_outer_step == 0 && random() % 2) {
        view.base_block_step = 0;
        view.block_stride = static_cast<int64_t>(shape.num_layers * shape.num_outer * shape.num_heads *
                                                 shape.num_tokens * shape.row_nbytes) +
                            static_cast<int64_t>(random() % 2) * 8;
      }
      if (random() % 2) {  // a pitch between rows
        view.head_stride *= 2;
        view.token_stride *= 2;
        view.layer_stride *= 2;
        view.outer_stride *= 2;
        view.block_stride *= 2;
      }
      view.offset = static_cast<int64_t>(random() % 3) * 8;
      if (random() % 2) {
        for (size_t i = 0; i < pool; ++i) ids[side].push_back(static_cast<int64_t>(i));
        if (random() % 2) std::shuffle(ids[side].begin(), ids[side].end(), random);
        view.block_ids = ids[side].data();
      }
    }
    const Plan plan = kvbm::make_plan(views[0], views[1], shape, num_blocks);
    const bool same = rows_of_plan(plan, shape.row_nbytes) == rows_by_definition(views[0], views[1], shape, num_blocks);
    if (!same) std::printf("round %d: ", round);
    EXPECT_EQ(same, true);
  }
}

}  // namespace

int main() {
  hnd_and_universal_meet_in_runs_of_tokens();
  nhd_and_universal_meet_in_rows();
  an_operational_block_and_its_own_stack_meet_in_chunks();
  the_same_layout_is_one_run();
  blocks_merge_only_where_both_sides_step_alike();
  packed_rows_never_merge_over_what_lies_between();
  the_alignment_is_what_every_address_shares();
  rows_that_share_cache_lines_are_written_in_order();
  sizes_past_32_bits_are_exact();
  a_plan_names_every_row_once();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
