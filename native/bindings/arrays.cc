#include <nanobind/stl/string.h>

#include "bindings.h"

namespace lohan {
namespace {

/// What the object's own __dlpack__ gave: a capsule, or the reason why there is none.
struct Exported {
  nb::object capsule;
  std::string refusal;
};

/// The text of the Python error that is set, which is cleared.
std::string TakeError() {
  nb::python_error error;  // takes it over
  return nb::cast<std::string>(nb::str(error.value()));
}

/// Calls __dlpack__ here, not in nanobind: handed the capsule itself, nanobind marks it as used, so that an
/// exporter that gives the same one twice is refused instead of its memory being freed twice. The reason an
/// exporter gives for a refusal is kept as well.
Exported Export(nb::handle object) {
  const nb::object method = object.attr("__dlpack__");
  Exported exported;
  try {
    try {
      exported.capsule = method(nb::arg("max_version") = nb::make_tuple(1, 0));
    } catch (const nb::python_error& error) {
      // Exporters older than array API 2023 do not know the argument.
      if (!error.matches(PyExc_TypeError)) throw;
      exported.capsule = method();
    }
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;  // KeyboardInterrupt and its kin
    exported.refusal = nb::cast<std::string>(nb::str(error.value()));
    return exported;
  }
  if (!PyCapsule_CheckExact(exported.capsule.ptr())) {
    exported.capsule.reset();
    exported.refusal = "its __dlpack__ returns no capsule";
  }
  return exported;
}

/// Why the object could not be imported, for the cases a caller meets.
[[noreturn]] void Refuse(nb::handle object, const char* name, ArrayUse use, const std::string& refusal) {
  const std::string type = nb::cast<std::string>(object.type().attr("__name__"));
  if (PyCapsule_CheckExact(object.ptr())) {
    throw nb::value_error((std::string(name) +
                           ": the capsule holds no array, or was used before; a DLPack capsule can be used "
                           "once: pass the array itself")
                              .c_str());
  }
  const bool is_array = nb::hasattr(object, "__dlpack__") || PyObject_CheckBuffer(object.ptr());
  if (!is_array) {
    throw nb::type_error((std::string(name) +
                          ": expected a 1-D host array (a torch tensor, a NumPy array or another "
                          "object with __dlpack__ or the buffer protocol), got " +
                          type)
                             .c_str());
  }
  const std::string reason =
      refusal.empty() ? "it may be read-only, used up, or of a data type without a DLPack form" : refusal;
  throw nb::value_error((std::string(name) + ": the " + type + " cannot be used as " +
                         (use == ArrayUse::kWrite ? "a writable" : "an") + " array on the host: " + reason)
                            .c_str());
}

/// Whether a torch tensor is longer than its storage, which may be resized behind its back; DLPack does not
/// tell.
bool EndsBeyondStorage(nb::handle object) {
  if (!nb::hasattr(object, "untyped_storage")) return false;
  const auto end =
      nb::cast<int64_t>(object.attr("storage_offset")()) + nb::cast<int64_t>(object.attr("numel")());
  const auto held = nb::cast<int64_t>(object.attr("untyped_storage")().attr("nbytes")());
  return end > held / nb::cast<int64_t>(object.attr("itemsize"));
}

/// Imports into `owner`; false when nanobind refuses.
bool TryImport(nb::handle source, ArrayUse use, nb::ndarray<nb::ro>& owner) {
  if (use == ArrayUse::kRead) return nb::try_cast(source, owner, false);
  nb::ndarray<> writable;
  if (!nb::try_cast(source, writable, false)) return false;
  owner = nb::ndarray<nb::ro>(writable);
  return true;
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
  if (nb::getattr(object, "requires_grad", nb::bool_(false)).is(nb::bool_(true))) {
    throw nb::value_error((std::string(name) + ": the tensor requires grad; pass its .detach()").c_str());
  }
  HostArray array;
  nb::object source;
  std::string refusal;
  if (PyCapsule_CheckExact(object.ptr())) {
    source = nb::borrow(object);
  } else if (nb::hasattr(object, "__dlpack__")) {
    Exported exported = Export(object);
    source = std::move(exported.capsule);
    refusal = std::move(exported.refusal);
  }
  if (!source.is_valid() && PyObject_CheckBuffer(object.ptr())) {
    // As a memoryview it has strides, which nanobind reads unasked and some exporters (ctypes) leave out.
    source = nb::steal(PyMemoryView_FromObject(object.ptr()));
    if (!source.is_valid()) refusal = TakeError();
  }
  if (!source.is_valid() || !TryImport(source, use, array.owner)) Refuse(object, name, use, refusal);
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
  if (array.length > 0 && (array.data == nullptr || EndsBeyondStorage(object))) {
    fail("the array's memory was freed or made smaller");
  }
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
