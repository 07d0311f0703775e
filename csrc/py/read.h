// Programs of pipeline_parallel/ops.py, which are tuples of Op objects and of tuples of them, as arrays.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "schedule.h"

namespace merak::pipeline {

namespace py = pybind11;

class Reader {
 public:
  // kinds: the members of Kind, in the order of the enum here.
  explicit Reader(const py::tuple& kinds) : kinds_(kinds) {
    if (kinds.size() != kKinds) throw py::value_error("eight kinds of ops expected");
  }

  // Appends the program of a rank; false where it holds what is no op of known kind with whole numbers.
  bool program(const py::handle& entries, Table& table) const {
    table.programs.push_back(int64_t(table.entries.size()));
    if (!PyTuple_Check(entries.ptr())) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries.ptr()); ++i) {
      PyObject* const entry = PyTuple_GET_ITEM(entries.ptr(), i);
      table.entries.push_back(int64_t(table.ops.size()));
      if (!PyTuple_Check(entry)) {
        if (!op(entry, table)) return false;
        continue;
      }
      for (Py_ssize_t part = 0; part < PyTuple_GET_SIZE(entry); ++part)
        if (!op(PyTuple_GET_ITEM(entry, part), table)) return false;
      if (PyTuple_GET_SIZE(entry) < 2) return false;
    }
    return true;
  }

  static void finish(Table& table) {
    table.programs.push_back(int64_t(table.entries.size()));
    table.entries.push_back(int64_t(table.ops.size()));
  }

 private:
  static py::str name(const char* text) { return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text)); }

  // A whole number of an attribute, -1 where it is none that fits.
  static int32_t whole(PyObject* owner, const py::str& attribute) {
    PyObject* const value = PyObject_GetAttr(owner, attribute.ptr());
    const long number = value == nullptr || !PyLong_CheckExact(value) ? -1 : PyLong_AsLong(value);
    Py_XDECREF(value);
    PyErr_Clear();
    return number < 0 || number > INT32_MAX ? -1 : int32_t(number);
  }

  bool op(PyObject* object, Table& table) const {
    PyObject* const kind = PyObject_GetAttr(object, kind_.ptr());
    PyErr_Clear();
    int known = 0;
    while (known < kKinds && PyTuple_GET_ITEM(kinds_.ptr(), known) != kind) ++known;
    Py_XDECREF(kind);
    const int32_t stage = whole(object, stage_), microbatch = whole(object, microbatch_);
    if (known == kKinds || stage < 0 || microbatch < 0) return false;
    table.ops.push_back({stage, microbatch, uint8_t(known)});
    table.communicates = table.communicates || !computes(uint8_t(known));
    return true;
  }

  const py::tuple& kinds_;
  const py::str stage_ = name("stage"), kind_ = name("kind"), microbatch_ = name("microbatch");
};

inline std::optional<Table> read(const py::tuple& programs, const py::tuple& kinds, int64_t microbatches,
                                 const std::vector<int32_t>& home) {
  if (microbatches < 0 || microbatches > INT32_MAX) return std::nullopt;
  Table table;
  table.stages = int64_t(home.size());
  table.microbatches = microbatches;
  table.ranks = int64_t(programs.size());
  table.home = home;
  const Reader reader(kinds);
  for (const py::handle program : programs)
    if (!reader.program(program, table)) return std::nullopt;
  Reader::finish(table);
  return table;
}

}  // namespace merak::pipeline
