#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace merak {
namespace {

[[noreturn]] void fail(int error, const std::string& what) {
  throw std::system_error(error, std::generic_category(), what);
}

// Removes the name again unless the object was made in full.
struct Name {
  const std::string& text;
  bool kept = false;
  ~Name() {
    if (!kept) shm_unlink(text.c_str());
  }
};

// Closes the file unless somebody took it.
struct File {
  int number;
  ~File() {
    if (number >= 0) ::close(number);
  }
  int take() { return std::exchange(number, -1); }
};

void allocate(int file, size_t bytes) {
#ifdef __linux__
  int error;
  do error = posix_fallocate(file, 0, off_t(bytes));
  while (error == EINTR);
  if (error != 0) fail(error, "cannot allocate shared memory");
#else
  if (ftruncate(file, off_t(bytes)) != 0) fail(errno, "cannot allocate shared memory");
#endif
}

struct flock byte(int place) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = place;
  lock.l_len = 1;
  return lock;
}

}  // namespace

Segment::Segment(int file, size_t bytes) : file_(file), data_(nullptr), size_(bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (at == MAP_FAILED) {
    const int error = errno;
    ::close(file);
    fail(error, "cannot map shared memory");
  }
  data_ = static_cast<char*>(at);
}

Segment::Segment(Segment&& other) noexcept
    : file_(std::exchange(other.file_, -1)), data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, size_);
  if (file_ >= 0) ::close(file_);
}

Segment Segment::create(const std::string& name, size_t bytes) {
  File file{shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600)};
  if (file.number < 0) fail(errno, "cannot create shared memory " + name);
  Name made{name};
  allocate(file.number, bytes);
  Segment segment(file.take(), bytes);
  made.kept = true;
  return segment;
}

Segment Segment::open(const std::string& name) {
  File file{shm_open(name.c_str(), O_RDWR, 0600)};
  if (file.number < 0) fail(errno, "cannot open shared memory " + name);
  struct stat found;
  if (fstat(file.number, &found) != 0) fail(errno, "cannot read the size of shared memory " + name);
  return Segment(file.take(), size_t(found.st_size));
}

void Segment::unlink(const std::string& name) {
  if (shm_unlink(name.c_str()) != 0 && errno != ENOENT) fail(errno, "cannot remove shared memory " + name);
}

void Segment::claim(int place) const {
  struct flock lock = byte(place);
  if (fcntl(file_, F_SETLK, &lock) != 0) fail(errno, "cannot lock shared memory");
}

bool Segment::claimed(int place) const {
  struct flock lock = byte(place);
  return fcntl(file_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace merak
