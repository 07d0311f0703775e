// The calls of another thread. All of it happens while this thread keeps the GIL, garbage collection off, so that no
// other thread sees a frame's object that this one holds: it would keep the variables of a function that has returned.
#include <pybind11/pybind11.h>

#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace merak {
namespace {

// File, line and function.
using Call = std::tuple<std::string, int, std::string>;

// Until it goes; a collection would run code of others, which may let go of the GIL.
class NoCollection {
 public:
  NoCollection() : was_(PyGC_Disable()) {}
  ~NoCollection() {
    if (was_) PyGC_Enable();
  }

 private:
  const int was_;
};

std::string text(const py::handle& name) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(name.ptr(), &size);
  if (bytes == nullptr) {
    PyErr_Clear();  // surrogates, from a path that is not UTF-8
    return "?";
  }
  return {bytes, size_t(size)};
}

Call call(PyFrameObject* frame) {
  const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  return {text(code.attr("co_filename")), PyFrame_GetLineNumber(frame), text(code.attr("co_name"))};
}

// The innermost first; none for a thread that is not there. sys._current_frames locks the list of threads, which
// faulthandler does not: it follows a thread that is just being made to address 0 (Python 3.11).
std::vector<Call> read(unsigned long thread) {
  const NoCollection kept;
  std::vector<Call> found;
  const py::dict frames = py::module_::import("sys").attr("_current_frames")();
  const py::int_ key(thread);
  if (!frames.contains(key)) return found;
  py::object frame = frames[key];
  while (!frame.is_none()) {
    const auto at = reinterpret_cast<PyFrameObject*>(frame.ptr());
    found.push_back(call(at));
    const auto back = reinterpret_cast<PyObject*>(PyFrame_GetBack(at));
    frame = back == nullptr ? py::object(py::none()) : py::reinterpret_steal<py::object>(back);
  }
  return found;
}

py::list calls(unsigned long thread) {
  py::list listed;
  for (const auto& [file, line, function] : read(thread)) listed.append(py::make_tuple(file, line, function));
  return listed;
}

}  // namespace

void bind_calls(py::module_& module) {
  module.def("calls", &calls, py::arg("thread"),
             "(file, line, function) of each call of a thread of this process, the innermost first.");
}

}  // namespace merak
