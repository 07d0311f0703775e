// Memory that several processes of one host map, and which of them are still there.
#pragma once

#include <cstddef>
#include <string>

namespace merak {

// A POSIX shared-memory object, mapped for as long as this lives. Errors are std::system_error.
class Segment {
 public:
  // A new one under `name` (it starts with a slash), zeroed, every page of it there: a mount that is full is an error
  // here and not a bus error later.
  static Segment create(const std::string& name, size_t bytes);
  static Segment open(const std::string& name);
  // Takes the name away; the memory goes with the last process that maps it.
  static void unlink(const std::string& name);

  Segment(Segment&& other) noexcept;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  char* data() const { return data_; }
  size_t size() const { return size_; }

  // Says that this process is there, until it ends, however it ends: a lock on one byte, which the kernel takes back.
  void claim(int place) const;
  // Whether another process has claimed `place` and lives.
  bool claimed(int place) const;

 private:
  Segment(int file, size_t bytes);

  int file_;
  char* data_;
  size_t size_;
};

}  // namespace merak
