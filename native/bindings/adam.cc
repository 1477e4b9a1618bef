#include "lohan/adam.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <utility>

#include "bindings.h"

namespace lohan {
namespace {

constexpr nb::dlpack::dtype kFloat32 = {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 32, 1};
constexpr nb::dlpack::dtype kBfloat16 = {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};

using NamedArray = std::pair<const char*, HostArray>;

void CheckAligned(const NamedArray& array) {
  if (reinterpret_cast<uintptr_t>(array.second.data) % static_cast<uintptr_t>(array.second.item_bytes) == 0)
    return;
  throw nb::value_error((std::string(array.first) + ": the memory is not aligned to its " +
                         std::to_string(array.second.item_bytes) + "-byte elements")
                            .c_str());
}

NamedArray Import(nb::handle object, const char* name, ArrayUse use, nb::dlpack::dtype expected) {
  NamedArray array = {name, ImportArray(object, name, use)};
  if (array.second.dtype != expected) {
    throw nb::type_error((std::string(name) + ": expected " + NameOf(expected) + " elements, got " +
                          NameOf(array.second.dtype))
                             .c_str());
  }
  CheckAligned(array);
  return array;
}

NamedArray ImportGradients(nb::handle object) {
  NamedArray array = {"gradients", ImportArray(object, "gradients", ArrayUse::kRead)};
  if (array.second.dtype != kFloat32 && array.second.dtype != kBfloat16) {
    throw nb::type_error(
        ("gradients: expected float32 or bfloat16 elements, got " + NameOf(array.second.dtype)).c_str());
  }
  CheckAligned(array);
  return array;
}

GradientArray GradientsOf(const HostArray& array) {
  return {array.data, array.dtype == kFloat32 ? GradientType::kFloat32 : GradientType::kBfloat16,
          array.length};
}

void CheckTogether(const std::vector<NamedArray>& arrays) {
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i].second.length != arrays[0].second.length) {
      throw nb::value_error((std::string(arrays[i].first) + " has " +
                             std::to_string(arrays[i].second.length) + " elements, gradients have " +
                             std::to_string(arrays[0].second.length))
                                .c_str());
    }
    for (size_t j = 0; j < i; ++j) {
      CheckDisjoint(arrays[j].second, arrays[j].first, arrays[i].second, arrays[i].first);
    }
  }
}

UpdateResult Update(const std::vector<AdamSegment>& segments, nb::handle gradients, nb::handle master,
                    nb::handle first_moment, nb::handle second_moment, nb::handle weights_out,
                    double gradient_scale, ThreadPool& pool, InstructionSet instruction_set) {
  std::vector<NamedArray> arrays;
  arrays.push_back(ImportGradients(gradients));
  arrays.push_back(Import(master, "master", ArrayUse::kWrite, kFloat32));
  arrays.push_back(Import(first_moment, "first_moment", ArrayUse::kWrite, kFloat32));
  arrays.push_back(Import(second_moment, "second_moment", ArrayUse::kWrite, kFloat32));
  if (!weights_out.is_none())
    arrays.push_back(Import(weights_out, "weights_out", ArrayUse::kWrite, kBfloat16));
  CheckTogether(arrays);
  AdamState state;
  state.master = reinterpret_cast<float*>(arrays[1].second.data);
  state.first_moment = reinterpret_cast<float*>(arrays[2].second.data);
  state.second_moment = reinterpret_cast<float*>(arrays[3].second.data);
  if (arrays.size() == 5) state.weights_out = reinterpret_cast<uint16_t*>(arrays[4].second.data);
  nb::gil_scoped_release release;
  return AdamwUpdate(segments, GradientsOf(arrays[0].second), state, gradient_scale, pool, instruction_set);
}

UpdateResult Norm(nb::handle gradients, double gradient_scale, ThreadPool& pool,
                  InstructionSet instruction_set) {
  const NamedArray array = ImportGradients(gradients);
  nb::gil_scoped_release release;
  return GradientNorm(GradientsOf(array.second), gradient_scale, pool, instruction_set);
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
}

}  // namespace

void InitAdam(nb::module_& m) {
  nb::class_<ThreadPool>(m, "ThreadPool",
                         R"(Worker threads for the compute kernels, on the CPUs of the maker's affinity mask.

Calls from several threads take turns. Using it in a forked child raises RuntimeError.)")
      .def(nb::init<int>(), nb::arg("threads") = 0,
           R"(Start `threads` workers; 0 starts one per CPU in the affinity mask.

Raises ValueError outside 0..1024.)")
      .def_prop_ro("threads", &ThreadPool::threads, "Number of workers.");
  InitSegment(m);
  InitResultAndEnum(m);

  m.def("available_instruction_sets", &AvailableInstructionSets,
        "The instruction sets this processor can run, narrowest first.");

  m.def("adamw_update", &Update, nb::arg("segments"), nb::arg("gradients"), nb::arg("master"),
        nb::arg("first_moment"), nb::arg("second_moment"), nb::arg("weights_out") = nb::none(), nb::kw_only(),
        nb::arg("gradient_scale") = 1.0, nb::arg("pool"), nb::arg("instruction_set") = InstructionSet::kAuto,
        R"(One step of AdamW in place, computed as torch.optim.AdamW does.

All arrays are 1-D, contiguous, in host memory and of one length: `gradients` float32 or bfloat16,
`master` and both moments float32, `weights_out` bfloat16 (rounded to nearest even). Gradients are
multiplied by `gradient_scale` first. Elements outside the segments keep their values and count to
nothing. Releases the GIL.

Raises TypeError for a wrong element type, ValueError for arrays or segments that do not fit together.)");

  m.def("gradient_norm", &Norm, nb::arg("gradients"), nb::kw_only(), nb::arg("gradient_scale") = 1.0,
        nb::arg("pool"), nb::arg("instruction_set") = InstructionSet::kAuto,
        R"(Squared norm and non-finite count of all elements.

Equal to adamw_update's, bit for bit, when its segments cover the arrays.)");
}

}  // namespace lohan
