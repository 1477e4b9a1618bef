#include "lohan/adam.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "adam_state.h"
#include "bindings.h"

namespace lohan {
namespace {

using State = BoundAdamState;

NamedArray ImportGradients(nb::handle object) {
  NamedArray array = {"gradients", ImportArray(object, "gradients", ArrayUse::kRead)};
  if (array.second.dtype != kFloat32Type && array.second.dtype != kBfloat16Type) {
    throw nb::type_error(
        ("gradients: expected float32 or bfloat16 elements, got " + NameOf(array.second.dtype)).c_str());
  }
  CheckAligned(array);
  return array;
}

GradientArray GradientsOf(const HostArray& array) {
  return {array.data, array.dtype == kFloat32Type ? GradientType::kFloat32 : GradientType::kBfloat16,
          array.length};
}

void CheckLengthIs(const NamedArray& array, int64_t length, const char* of_what) {
  if (array.second.length == length) return;
  throw nb::value_error((std::string(array.first) + " has " + std::to_string(array.second.length) +
                         " elements, " + of_what + " " + std::to_string(length))
                            .c_str());
}

void CheckAllDisjoint(const std::vector<NamedArray>& arrays, const std::vector<NamedArray>& others) {
  for (const NamedArray& array : arrays) {
    for (const NamedArray& other : others)
      CheckDisjoint(array.second, array.first, other.second, other.first);
  }
}

UpdateResult Update(const std::vector<AdamSegment>& segments, nb::handle gradients, const State& state,
                    const State* out, double gradient_scale, ThreadPool& pool,
                    InstructionSet instruction_set) {
  const std::vector<NamedArray> source = {ImportGradients(gradients)};
  CheckLengthIs(source[0], state.length, "the state");
  CheckAllDisjoint(state.arrays, source);
  if (out == nullptr) out = &state;
  if (out != &state) {
    if (out->length != state.length) {
      throw nb::value_error(
          ("out has " + std::to_string(out->length) + " elements, the state " + std::to_string(state.length))
              .c_str());
    }
    CheckAllDisjoint(out->arrays, source);
    CheckAllDisjoint(out->arrays, state.arrays);
  }
  nb::gil_scoped_release release;
  return AdamwUpdate(segments, GradientsOf(source[0].second), state.state, out->state, gradient_scale, pool,
                     instruction_set);
}

UpdateResult Norm(nb::handle gradients, double gradient_scale, ThreadPool& pool,
                  InstructionSet instruction_set) {
  const NamedArray array = ImportGradients(gradients);
  nb::gil_scoped_release release;
  return GradientNorm(GradientsOf(array.second), gradient_scale, pool, instruction_set);
}

/// Several arrays of one length that share no memory.
std::vector<NamedArray> Together(std::vector<NamedArray> arrays) {
  for (size_t i = 1; i < arrays.size(); ++i) {
    CheckLengthIs(arrays[i], arrays[0].second.length, arrays[0].first);
    for (size_t j = 0; j < i; ++j)
      CheckDisjoint(arrays[j].second, arrays[j].first, arrays[i].second, arrays[i].first);
  }
  return arrays;
}

void Split(nb::handle master, nb::handle weights, nb::handle remainder, ThreadPool& pool,
           InstructionSet instruction_set) {
  const auto arrays = Together({ImportTyped(master, "master", ArrayUse::kRead, kFloat32Type),
                                ImportTyped(weights, "weights", ArrayUse::kWrite, kBfloat16Type),
                                ImportTyped(remainder, "remainder", ArrayUse::kWrite, kInt16Type)});
  nb::gil_scoped_release release;
  SplitMaster(arrays[0].second.As<float>(), arrays[1].second.As<uint16_t>(), arrays[2].second.As<int16_t>(),
              arrays[0].second.length, pool, instruction_set);
}

void Join(nb::handle weights, nb::handle remainder, nb::handle master, ThreadPool& pool,
          InstructionSet instruction_set) {
  const auto arrays = Together({ImportTyped(weights, "weights", ArrayUse::kRead, kBfloat16Type),
                                ImportTyped(remainder, "remainder", ArrayUse::kRead, kInt16Type),
                                ImportTyped(master, "master", ArrayUse::kWrite, kFloat32Type)});
  nb::gil_scoped_release release;
  JoinMaster(arrays[0].second.As<uint16_t>(), arrays[1].second.As<int16_t>(), arrays[2].second.As<float>(),
             arrays[0].second.length, pool, instruction_set);
}

void Decode(MomentCode code, nb::handle codes, nb::handle scales, nb::handle moments, ThreadPool& pool,
            InstructionSet instruction_set) {
  const auto arrays = Together({ImportTyped(codes, "codes", ArrayUse::kRead, kUint8Type),
                                ImportTyped(moments, "moments", ArrayUse::kWrite, kFloat32Type)});
  const NamedArray factors = ImportTyped(scales, "scales", ArrayUse::kRead, kFloat32Type);
  CheckLengthIs(factors, MomentBlocks(arrays[0].second.length), "codes need");
  CheckAllDisjoint(arrays, {factors});
  nb::gil_scoped_release release;
  DecodeMoment(code, arrays[0].second.As<uint8_t>(), factors.second.As<float>(), arrays[1].second.As<float>(),
               arrays[0].second.length, pool, instruction_set);
}

void Reference(nb::handle a, nb::handle b, nb::handle c, nb::handle source, ThreadPool& pool,
               InstructionSet instruction_set) {
  const auto arrays = Together({ImportTyped(a, "a", ArrayUse::kWrite, kFloat32Type),
                                ImportTyped(b, "b", ArrayUse::kWrite, kFloat32Type),
                                ImportTyped(c, "c", ArrayUse::kWrite, kFloat32Type),
                                ImportTyped(source, "source", ArrayUse::kRead, kFloat32Type)});
  nb::gil_scoped_release release;
  ReadModifyWrite(arrays[0].second.As<float>(), arrays[1].second.As<float>(), arrays[2].second.As<float>(),
                  arrays[3].second.As<float>(), arrays[0].second.length, pool, instruction_set);
}

void InitSegment(nb::module_& m) {
  nb::class_<AdamSegment>(m, "AdamSegment",
                          "Consecutive elements that share hyper-parameters and step count.")
      .def(
          "__init__",
          [](AdamSegment* self, int64_t offset, int64_t length, double learning_rate, double beta1,
             double beta2, double epsilon, double weight_decay, int64_t step) {
            AdamSegment segment{offset, length, learning_rate, beta1, beta2, epsilon, weight_decay, step};
            segment.Validate();
            new (self) AdamSegment(segment);
          },
          nb::arg("offset"), nb::arg("length"), nb::arg("learning_rate"), nb::arg("beta1"), nb::arg("beta2"),
          nb::arg("epsilon"), nb::arg("weight_decay"), nb::arg("step"),
          R"(Elements [offset, offset + length).

Raises ValueError for a value that torch.optim.AdamW would not take.)")
      .def_ro("offset", &AdamSegment::offset, "First element.")
      .def_ro("length", &AdamSegment::length, "Number of elements.")
      .def_ro("learning_rate", &AdamSegment::learning_rate)
      .def_ro("beta1", &AdamSegment::beta1)
      .def_ro("beta2", &AdamSegment::beta2)
      .def_ro("epsilon", &AdamSegment::epsilon)
      .def_ro("weight_decay", &AdamSegment::weight_decay)
      .def_ro("step", &AdamSegment::step, "Number of this update, counted from 1.");
}

void InitResultAndEnum(nb::module_& m) {
  nb::class_<UpdateResult>(m, "UpdateResult", "What a pass saw of the gradients, after scaling.")
      .def_ro("squared_norm", &UpdateResult::squared_norm,
              "Sum of squares in float64, in an order that depends on nothing but the number of elements.")
      .def_ro("non_finite", &UpdateResult::non_finite, "Number of infinite or NaN elements.");

  nb::enum_<InstructionSet>(m, "InstructionSet", "Which build of the kernels runs; all give the same bits.")
      .value("AUTO", InstructionSet::kAuto, "The widest one available.")
      .value("PORTABLE", InstructionSet::kPortable)
      .value("AVX2", InstructionSet::kAvx2)
      .value("AVX512", InstructionSet::kAvx512);

  nb::enum_<MomentCode>(m, "MomentCode", "Which of the two moments 8-bit codes stand for.")
      .value("FIRST", MomentCode::kFirst)
      .value("SECOND", MomentCode::kSecond);
}

}  // namespace

void InitAdam(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool",
                         R"(Worker threads for the compute kernels, on the CPUs of the maker's affinity mask.

They give way to the process's other threads. Calls from several threads take turns. Using it in a forked
child raises RuntimeError.)")
      .def(nb::init<int>(), nb::arg("threads") = 0,
           R"(Start `threads` workers; 0 starts one per CPU in the affinity mask.

Raises ValueError outside 0..1024.)")
      .def_prop_ro("threads", &ThreadPool::threads, "Number of workers.");
  InitSegment(m);
  InitResultAndEnum(m);

  m.def("available_instruction_sets", &AvailableInstructionSets,
        "The instruction sets this processor can run, narrowest first.");

  InitAdamState(m);

  m.def("adamw_update", &Update, nb::arg("segments"), nb::arg("gradients"), nb::arg("state"), nb::kw_only(),
        nb::arg("out") = nb::none(), nb::arg("gradient_scale") = 1.0, nb::arg("pool"),
        nb::arg("instruction_set") = InstructionSet::kAuto,
        R"(One step of AdamW, computed as torch.optim.AdamW does.

`gradients` are float32 or bfloat16, 1-D, contiguous, in host memory and as long as the state; they are
multiplied by `gradient_scale` first. The new state goes to `out`, which has the state's form and shares no
memory with it, or in place; to `out` fastest where its arrays begin at multiples of 64 bytes. Elements outside the segments are not touched and count to nothing; with 8-bit
moments each segment begins at a multiple of 256, past the last block of the one before. Releases the GIL.

Raises TypeError for a wrong element type, ValueError for arrays or segments that do not fit together.)");

  m.def("gradient_norm", &Norm, nb::arg("gradients"), nb::kw_only(), nb::arg("gradient_scale") = 1.0,
        nb::arg("pool"), nb::arg("instruction_set") = InstructionSet::kAuto,
        R"(Squared norm and non-finite count of all elements.

Equal to adamw_update's, bit for bit, when its segments cover the arrays.)");

  m.def("split_master", &Split, nb::arg("master"), nb::arg("weights"), nb::arg("remainder"), nb::kw_only(),
        nb::arg("pool"), nb::arg("instruction_set") = InstructionSet::kAuto,
        R"(Write float32 `master` as bfloat16 `weights` and int16 `remainder`.

The value's bits are (weights << 16) + remainder: `weights` is the nearest bfloat16, ties away from zero, and
nothing is lost; a NaN becomes the canonical one. 1-D arrays of one length that share no memory.)");

  m.def("join_master", &Join, nb::arg("weights"), nb::arg("remainder"), nb::arg("master"), nb::kw_only(),
        nb::arg("pool"), nb::arg("instruction_set") = InstructionSet::kAuto,
        "The reverse of `split_master`.");

  m.def("decode_moment", &Decode, nb::arg("code"), nb::arg("codes"), nb::arg("scales"), nb::arg("moments"),
        nb::kw_only(), nb::arg("pool"), nb::arg("instruction_set") = InstructionSet::kAuto,
        R"(Write the float32 values that 8-bit `codes` with one scale per 256 elements stand for.

With MomentCode.SECOND these are the second moments themselves, not the coded square roots.)");

  m.def("read_modify_write", &Reference, nb::arg("a"), nb::arg("b"), nb::arg("c"), nb::arg("source"),
        nb::kw_only(), nb::arg("pool"), nb::arg("instruction_set") = InstructionSet::kAuto,
        R"(Add `source` to `a`, `b` and `c`, all float32: 28 bytes of memory traffic an element.

The reference for an update's speed: its own pattern of streams with nothing to compute.)");
}

}  // namespace lohan
