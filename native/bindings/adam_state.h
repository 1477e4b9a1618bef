// The state of an update as Python holds it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings.h"
#include "lohan/adam_state.h"

namespace lohan {

inline constexpr nb::dlpack::dtype kFloat32Type = {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 32,
                                                   1};
inline constexpr nb::dlpack::dtype kBfloat16Type = {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16,
                                                    1};
inline constexpr nb::dlpack::dtype kInt16Type = {static_cast<uint8_t>(nb::dlpack::dtype_code::Int), 16, 1};
inline constexpr nb::dlpack::dtype kUint8Type = {static_cast<uint8_t>(nb::dlpack::dtype_code::UInt), 8, 1};

using NamedArray = std::pair<const char*, HostArray>;

/// Throws ValueError when the memory is not aligned to its elements.
void CheckAligned(const NamedArray& array);

/// ImportArray, with TypeError for elements of another type than `expected` and ValueError for misaligned
/// ones.
NamedArray ImportTyped(nb::handle object, const char* name, ArrayUse use, nb::dlpack::dtype expected);

/// Scales that `length` 8-bit codes need.
inline int64_t MomentBlocks(int64_t length) {
  return (length + kMomentBlockElements - 1) / kMomentBlockElements;
}

/// An AdamState with the arrays that its pointers lead to. To be destroyed with the GIL held.
struct BoundAdamState {
  AdamState state;
  std::vector<NamedArray> arrays;
  int64_t length = 0;
};

void InitAdamState(nb::module_& m);

}  // namespace lohan
