// megatron_merak._C.shared_memory: the communicator as Python sees it. Tensors come as addresses.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <system_error>

#include "communicator.h"

namespace py = pybind11;

namespace merak {
namespace {

template <class T>
T address(uintptr_t number) {
  return reinterpret_cast<T>(number);
}

template <class T>
std::vector<T> addresses(const std::vector<uintptr_t>& numbers) {
  std::vector<T> found;
  for (const uintptr_t number : numbers) found.push_back(address<T>(number));
  return found;
}

// Waits hear of signals, so that a Ctrl-C ends them.
Limit limit(double seconds) {
  return {seconds, [] {
            const py::gil_scoped_acquire held;
            if (PyErr_CheckSignals() != 0) throw py::error_already_set();
          }};
}

void as_os_error(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const std::system_error& error) {
    const py::tuple values = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, values.ptr());
  }
}

}  // namespace

void bind_shared_memory(py::module_& module) {
  py::module_ part = module.def_submodule("shared_memory", "Collectives of the ranks of one host.");
  py::register_local_exception_translator(as_os_error);

  py::enum_<Element>(part, "Element")
      .value("float32", Element::float32)
      .value("float64", Element::float64)
      .value("bfloat16", Element::bfloat16)
      .value("float16", Element::float16)
      .value("int32", Element::int32)
      .value("int64", Element::int64);
  py::enum_<Reduction>(part, "Reduction").value("sum", Reduction::sum).value("max", Reduction::max);
  py::class_<Shape>(part, "Shape")
      .def(py::init<int, int, size_t>(), py::arg("ranks"), py::arg("slots"), py::arg("slot_bytes"))
      .def_property_readonly("bytes", &Shape::bytes);
  py::class_<Seat>(part, "Seat")
      .def(py::init<int, std::vector<int>, std::string, bool>(), py::arg("place"), py::arg("ranks"), py::arg("group"),
           py::arg("crowded"));
  part.attr("MOST_RANKS") = kMostRanks;
  part.def("unlink", &Segment::unlink, py::arg("name"));

  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<Communicator>(part, "Communicator")
      .def_static("create", &Communicator::create, Released())
      .def_static("join", &Communicator::join, Released())
      .def("watch", &Communicator::watch, Released())
      .def(
          "all_reduce",
          [](Communicator& self, uintptr_t in, uintptr_t out, size_t bytes, Element element, Reduction reduction,
             double seconds) {
            return self.all_reduce(address<const char*>(in), address<char*>(out), bytes, element, reduction,
                                   limit(seconds));
          },
          Released())
      .def(
          "reduce_scatter",
          [](Communicator& self, const std::vector<uintptr_t>& in, uintptr_t out, size_t bytes, Element element,
             Reduction reduction, double seconds) {
            return self.reduce_scatter(addresses<const char*>(in), address<char*>(out), bytes, element, reduction,
                                       limit(seconds));
          },
          Released())
      .def(
          "all_gather",
          [](Communicator& self, uintptr_t in, const std::vector<uintptr_t>& out, size_t bytes, double seconds) {
            return self.all_gather(address<const char*>(in), addresses<char*>(out), bytes, limit(seconds));
          },
          Released())
      .def(
          "broadcast",
          [](Communicator& self, uintptr_t data, size_t bytes, int root, double seconds) {
            return self.broadcast(address<char*>(data), bytes, root, limit(seconds));
          },
          Released())
      .def(
          "wait", [](Communicator& self, uint64_t number, double seconds) { self.wait(number, limit(seconds)); },
          Released())
      .def(
          "test", [](Communicator& self, uint64_t number, double seconds) { return self.test(number, limit(seconds)); },
          Released())
      .def("done", &Communicator::done)
      .def("abort", &Communicator::abort)
      .def("close", &Communicator::close, Released());
}

}  // namespace merak
