// What ranks compare of an operation, and how a message names it.
#include "communicator.h"

namespace merak {

Communicator::Signature Communicator::Operation::signature() const {
  return {uint64_t(kind) | uint64_t(element) << 8 | uint64_t(reduction) << 16 | uint64_t(root) << 24, bytes};
}

std::string Communicator::Operation::text() const {
  static const char* const kinds[] = {"an all-reduce", "a reduce-scatter", "an all-gather", "a broadcast"};
  static const char* const elements[] = {"float32", "float64", "bfloat16", "float16", "int32", "int64"};
  std::string text = std::string(kinds[int(kind)]) + " of " + std::to_string(bytes) + " bytes";
  if (kind == Kind::all_reduce || kind == Kind::reduce_scatter)
    text += std::string(" of ") + elements[int(element)] + (reduction == Reduction::sum ? ", sum" : ", max");
  return text;
}

}  // namespace merak
