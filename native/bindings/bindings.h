// What the binding files share. Each init_* adds one area to the module; module.cc lists them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "lohan/aligned_buffer.h"

namespace nb = nanobind;

namespace lohan {

/// A caller's array, checked: 1-D, contiguous and on the host. Keeps the memory alive; to be destroyed with
/// the GIL held.
struct HostArray {
  nb::ndarray<nb::ro> owner;
  std::byte* data = nullptr;
  int64_t length = 0;
  int64_t item_bytes = 0;
  nb::dlpack::dtype dtype;

  int64_t size_bytes() const { return length * item_bytes; }
  /// The elements; the caller has checked the type.
  template <typename Element>
  Element* As() const {
    return reinterpret_cast<Element*>(data);
  }
};

enum class ArrayUse { kRead, kWrite };

/// Throws TypeError for what is no array, ValueError for one that cannot be used; `name` is the argument.
HostArray ImportArray(nb::handle object, const char* name, ArrayUse use);

/// Throws ValueError when two of the arrays share memory.
void CheckDisjoint(const HostArray& a, const char* a_name, const HostArray& b, const char* b_name);

/// "float32", "bfloat16" and so on.
std::string NameOf(nb::dlpack::dtype dtype);

void InitMemory(nb::module_& m);
void InitAdam(nb::module_& m);
void InitChecksum(nb::module_& m);
void InitIo(nb::module_& m);

}  // namespace lohan
