#include "adam_state.h"

#include <string>

namespace lohan {
namespace {

/// Collects a state's arrays and checks that they make one.
class Builder {
 public:
  /// The element pointer of an array that may be None.
  template <typename Element>
  Element* Add(nb::handle object, const char* name, nb::dlpack::dtype expected) {
    if (object.is_none()) return nullptr;
    result_.arrays.push_back(ImportTyped(object, name, ArrayUse::kWrite, expected));
    return result_.arrays.back().second.As<Element>();
  }

  /// A moment: float32 values, or 8-bit codes with scales.
  void AddMoment(nb::handle moment, const char* name, nb::handle scales, const char* scales_name,
                 float*& values, uint8_t*& codes, float*& factors) {
    if (scales.is_none()) {
      values = Add<float>(moment, name, kFloat32Type);
      return;
    }
    codes = Add<uint8_t>(moment, name, kUint8Type);
    scales_.push_back(ImportTyped(scales, scales_name, ArrayUse::kWrite, kFloat32Type));
    factors = scales_.back().second.As<float>();
  }

  BoundAdamState Finish() {
    std::vector<NamedArray>& arrays = result_.arrays;
    result_.length = arrays[0].second.length;
    for (const NamedArray& array : arrays) CheckLength(array, result_.length, arrays[0].first);
    for (const NamedArray& array : scales_) {
      CheckLength(array, MomentBlocks(result_.length), "one per 256 elements makes");
    }
    arrays.insert(arrays.end(), scales_.begin(), scales_.end());
    for (size_t i = 0; i < arrays.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        CheckDisjoint(arrays[j].second, arrays[j].first, arrays[i].second, arrays[i].first);
      }
    }
    return std::move(result_);
  }

  AdamState& state() { return result_.state; }

 private:
  static void CheckLength(const NamedArray& array, int64_t length, const char* of_what) {
    if (array.second.length == length) return;
    throw nb::value_error((std::string(array.first) + " has " + std::to_string(array.second.length) +
                           " elements; " + of_what + " " + std::to_string(length))
                              .c_str());
  }

  BoundAdamState result_;
  std::vector<NamedArray> scales_;
};

BoundAdamState Make(nb::handle master, nb::handle weights, nb::handle remainder, nb::handle first_moment,
                    nb::handle first_scales, nb::handle second_moment, nb::handle second_scales) {
  if (master.is_none() == remainder.is_none()) {
    throw nb::value_error(
        "give either master (float32) or remainder (int16, with weights), not both or neither");
  }
  if (master.is_none() && weights.is_none())
    throw nb::value_error("a split master needs weights beside remainder");
  if (first_scales.is_none() != second_scales.is_none()) {
    throw nb::value_error("give the scales of both moments (8-bit) or of none (float32)");
  }
  Builder builder;
  AdamState& state = builder.state();
  state.master = builder.Add<float>(master, "master", kFloat32Type);
  state.weights = builder.Add<uint16_t>(weights, "weights", kBfloat16Type);
  state.remainder = builder.Add<int16_t>(remainder, "remainder", kInt16Type);
  builder.AddMoment(first_moment, "first_moment", first_scales, "first_scales", state.first_moment,
                    state.first_codes, state.first_scales);
  builder.AddMoment(second_moment, "second_moment", second_scales, "second_scales", state.second_moment,
                    state.second_codes, state.second_scales);
  return builder.Finish();
}

}  // namespace

void CheckAligned(const NamedArray& array) {
  if (reinterpret_cast<uintptr_t>(array.second.data) % static_cast<uintptr_t>(array.second.item_bytes) == 0)
    return;
  throw nb::value_error((std::string(array.first) + ": the memory is not aligned to its " +
                         std::to_string(array.second.item_bytes) + "-byte elements")
                            .c_str());
}

NamedArray ImportTyped(nb::handle object, const char* name, ArrayUse use, nb::dlpack::dtype expected) {
  NamedArray array = {name, ImportArray(object, name, use)};
  if (array.second.dtype != expected) {
    throw nb::type_error((std::string(name) + ": expected " + NameOf(expected) + " elements, got " +
                          NameOf(array.second.dtype))
                             .c_str());
  }
  CheckAligned(array);
  return array;
}

void InitAdamState(nb::module_& m) {
  nb::class_<BoundAdamState>(
      m, "AdamState",
      R"(The arrays of an AdamW state: 1-D, contiguous, writable, in host memory, disjoint.

Master weights are float32 `master`, with `weights` as an optional bfloat16 copy (rounded to nearest even), or
split: bfloat16 `weights` and int16 `remainder` (see `split_master`). Moments are float32, or uint8 codes with
float32 scales, one per 256 elements; the second moment is coded by its square root. Zero-filled arrays are
zero moments in both forms. The object keeps the arrays alive.)")
      .def(
          "__init__",
          [](BoundAdamState* self, nb::handle first_moment, nb::handle second_moment, nb::handle master,
             nb::handle weights, nb::handle remainder, nb::handle first_scales, nb::handle second_scales) {
            new (self) BoundAdamState(
                Make(master, weights, remainder, first_moment, first_scales, second_moment, second_scales));
          },
          nb::kw_only(), nb::arg("first_moment"), nb::arg("second_moment"), nb::arg("master") = nb::none(),
          nb::arg("weights") = nb::none(), nb::arg("remainder") = nb::none(),
          nb::arg("first_scales") = nb::none(), nb::arg("second_scales") = nb::none(),
          "Raises TypeError for a wrong element type, ValueError for arrays that make no state.")
      .def_ro("length", &BoundAdamState::length, "Number of elements.");
}

}  // namespace lohan
