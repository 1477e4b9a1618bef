#include <nanobind/stl/string.h>

#include "bindings.h"

namespace lohan {
namespace {

/// Why nanobind could not import the object, for the cases a caller meets.
[[noreturn]] void Refuse(nb::handle object, const char* name, ArrayUse use) {
  const std::string type = nb::cast<std::string>(object.type().attr("__name__"));
  const bool is_array = nb::hasattr(object, "__dlpack__") || PyObject_CheckBuffer(object.ptr());
  if (!is_array) {
    throw nb::type_error((std::string(name) +
                          ": expected a 1-D host array (a torch tensor, a NumPy array or another "
                          "object with __dlpack__ or the buffer protocol), got " +
                          type)
                             .c_str());
  }
  throw nb::value_error((std::string(name) + ": the " + type + " cannot be used as " +
                         (use == ArrayUse::kWrite ? "a writable" : "an") +
                         " array on the host; it may be read-only or of a data type without a DLPack form")
                            .c_str());
}

}  // namespace

std::string NameOf(nb::dlpack::dtype dtype) {
  using nb::dlpack::dtype_code;
  std::string name = "type code " + std::to_string(dtype.code) + " with ";
  if (dtype.code == static_cast<uint8_t>(dtype_code::Float)) name = "float";
  if (dtype.code == static_cast<uint8_t>(dtype_code::Bfloat)) name = "bfloat";
  if (dtype.code == static_cast<uint8_t>(dtype_code::Int)) name = "int";
  if (dtype.code == static_cast<uint8_t>(dtype_code::UInt)) name = "uint";
  if (dtype.code == static_cast<uint8_t>(dtype_code::Complex)) name = "complex";
  return name + std::to_string(dtype.bits);
}

HostArray ImportArray(nb::handle object, const char* name, ArrayUse use) {
  // torch refuses these in __dlpack__ too, but nanobind then takes an older way round that check.
  if (nb::getattr(object, "requires_grad", nb::bool_(false)).is(nb::bool_(true))) {
    throw nb::value_error((std::string(name) + ": the tensor requires grad; pass its .detach()").c_str());
  }
  HostArray array;
  bool imported = false;
  if (use == ArrayUse::kWrite) {
    nb::ndarray<> writable;
    imported = nb::try_cast(object, writable, false);
    if (imported) array.owner = nb::ndarray<nb::ro>(writable);
  } else {
    imported = nb::try_cast(object, array.owner, false);
  }
  if (!imported) Refuse(object, name, use);
  const auto fail = [name](const std::string& reason) {
    throw nb::value_error((std::string(name) + ": " + reason).c_str());
  };
  const nb::ndarray<nb::ro>& view = array.owner;
  if (view.device_type() != nb::device::cpu::value && view.device_type() != nb::device::cuda_host::value) {
    fail("the array is not in host memory (DLPack device type " + std::to_string(view.device_type()) + ")");
  }
  if (view.ndim() != 1) fail("expected 1 dimension, got " + std::to_string(view.ndim()));
  if (view.shape(0) > 1 && view.stride(0) != 1) {
    fail("the array is not contiguous (stride " + std::to_string(view.stride(0)) + ")");
  }
  array.dtype = view.dtype();
  if (array.dtype.lanes != 1 || array.dtype.bits % 8 != 0)
    fail("elements of " + NameOf(array.dtype) + " are not whole bytes");
  array.item_bytes = array.dtype.bits / 8;
  array.length = static_cast<int64_t>(view.shape(0));
  array.data = const_cast<std::byte*>(static_cast<const std::byte*>(view.data()));
  return array;
}

void CheckDisjoint(const HostArray& a, const char* a_name, const HostArray& b, const char* b_name) {
  const auto a_begin = reinterpret_cast<uintptr_t>(a.data);
  const auto b_begin = reinterpret_cast<uintptr_t>(b.data);
  if (a_begin < b_begin + static_cast<uintptr_t>(b.size_bytes()) &&
      b_begin < a_begin + static_cast<uintptr_t>(a.size_bytes())) {
    throw nb::value_error((std::string(a_name) + " and " + b_name + " overlap in memory").c_str());
  }
}

}  // namespace lohan
