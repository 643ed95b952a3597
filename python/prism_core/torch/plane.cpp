// The value plane: small operators on values that are known, run on the CPU in the emulated device's own memory.
//
// Device memory of the emulated device is host memory. The operator runs on the device first, which launches, allocates
// and takes virtual time as ever and computes nothing; then the same operator runs on CPU tensors that alias the same
// bytes, if all its inputs are known (or provided by a rule) and small. Operators whose results have a shape that depends
// on values run on the CPU first, and what they ask the device for is answered with the number found there.
//
// The functions below sit between autograd and the device: BackendSelect is among the dispatch keys of every operator
// on every thread, comes after Python's modes, and is used by nothing but factory functions, none of which is here.
#include <ATen/core/Tensor.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <dlfcn.h>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using torch::jit::Stack;

// Grades as libprism_cuda tells them: 0 unknown, -1 known, any other number the rule that provides the value.
constexpr int UNKNOWN = 0;
constexpr int KNOWN = -1;
// Rows of a strided tensor that are looked at one by one.
constexpr int64_t MOST_ROWS = 1 << 16;
constexpr int64_t MOST_RANDOM_FLOAT_BYTES = 64 << 10;

struct Library {
  int (*grade)(const void*, size_t) = nullptr;
  void (*set)(const void*, size_t, int) = nullptr;
  int (*rule)(const char*) = nullptr;
  void (*hold)() = nullptr;
  int (*release)() = nullptr;
  void (*script)(int64_t, int) = nullptr;
  void (*note)(const char*) = nullptr;

  Library() {
    load(grade, "prism_value_grade");
    load(set, "prism_value_set");
    load(rule, "prism_value_rule");
    load(hold, "prism_value_hold");
    load(release, "prism_value_release");
    load(script, "prism_value_script");
    load(note, "prism_value_note");
  }

  bool complete() const { return grade && set && rule && hold && release && script && note; }

 private:
  template <class Function>
  static void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }
};

const Library& library() {
  static const Library found;
  return found;
}

std::atomic<bool> is_on{false};
// Larger tensors are not computed with.
std::atomic<int64_t> most_bytes{1 << 20};
std::atomic<uint64_t> num_run{0};
// Updates of a loss scale so far, and those at which gradients are taken to overflow.
std::atomic<int64_t> num_scale_updates{0};
std::mutex overflow_lock;
std::set<int64_t> overflows;
// Operators that run inside another one of the plane.
thread_local int depth = 0;

struct Deeper {
  Deeper() { ++depth; }
  ~Deeper() { --depth; }
};

bool is_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has_backend(c10::BackendComponent::CUDABit);
}

bool is_plain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_conj() && !tensor.is_neg() &&
      !tensor.is_quantized() && !tensor.key_set().has(c10::DispatchKey::Python);
}

int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.itemsize());
}

// Calls `visit(address, bytes)` for each contiguous part of a tensor; false if there are too many.
template <class Visit>
bool for_each_part(const at::Tensor& tensor, Visit visit) {
  if (tensor.numel() == 0) return true;
  const auto* start = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.is_non_overlapping_and_dense()) {
    visit(start, static_cast<size_t>(bytes_of(tensor)));
    return true;
  }
  // The innermost dimensions that are contiguous make a run.
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t run = 1;
  int64_t outer = tensor.dim();
  while (outer > 0 && (sizes[outer - 1] == 1 || strides[outer - 1] == run)) run *= sizes[--outer];
  if (tensor.numel() / run > MOST_ROWS) return false;
  const int64_t itemsize = static_cast<int64_t>(tensor.itemsize());
  std::vector<int64_t> index(outer, 0);
  while (true) {
    int64_t offset = 0;
    for (int64_t d = 0; d < outer; ++d) offset += index[d] * strides[d];
    visit(start + offset * itemsize, static_cast<size_t>(run * itemsize));
    int64_t d = outer - 1;
    while (d >= 0 && ++index[d] == sizes[d]) index[d--] = 0;
    if (d < 0) return true;
  }
}

int worse(int a, int b) {
  if (a == UNKNOWN || b == UNKNOWN) return UNKNOWN;
  return a == KNOWN ? b : a;
}

int grade_of(const at::Tensor& tensor) {
  if (!is_device(tensor) || tensor.numel() == 0) return KNOWN;
  if (!is_plain(tensor)) return UNKNOWN;
  int grade = KNOWN;
  const bool all = for_each_part(tensor, [&](const char* start, size_t bytes) {
    if (grade != UNKNOWN) grade = worse(grade, library().grade(start, bytes));
  });
  return all ? grade : UNKNOWN;
}

void set_grade(const at::Tensor& tensor, int grade) {
  if (is_device(tensor) && is_plain(tensor)) {
    for_each_part(tensor, [&](const char* start, size_t bytes) { library().set(start, bytes, grade); });
  }
}

void set_unknown(const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.layout() != at::kStrided) return;
  const auto forget = [](const char* start, size_t bytes) { library().set(start, bytes, UNKNOWN); };
  if (!for_each_part(tensor, forget)) forget(static_cast<const char*>(tensor.storage().data()), tensor.storage().nbytes());
}

// A CPU tensor over the bytes of a device tensor; any other tensor as it is.
at::Tensor alias(const at::Tensor& tensor) {
  if (!is_device(tensor)) return tensor;
  auto made = at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
      tensor.options().device(at::kCPU).requires_grad(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Calls `visit` for each tensor in a value.
template <class Visit>
void for_each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) visit(item.toTensor());
    }
  }
}

c10::IValue on_cpu(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(alias(value.toTensor())) : value;
  if (value.isDevice()) return value.toDevice().is_cuda() ? c10::IValue(c10::Device(at::kCPU)) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(alias(tensor));
    return list;
  }
  // Lists of optional tensors (indices).
  if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    auto list = c10::impl::GenericList(value.toList().elementType());
    for (const c10::IValue& item : value.toListRef()) list.push_back(on_cpu(item));
    return list;
  }
  return value;
}

enum class Kind {
  // Runs if all inputs are known.
  PLAIN,
  // As PLAIN, and overwrites the tensor it changes whatever was in it.
  OVERWRITES,
  // As PLAIN; the shape of its result depends on values, or its result is a number for the host.
  SHAPE,
  // Random numbers, from a generator of the CPU: provided by a rule.
  RANDOM,
  // Not run, but its inputs are not changed by it.
  READS,
};

// What an operator is called with.
struct Call {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet below;
  Stack* stack;
  std::vector<c10::IValue> arguments;
  // Of tensors that are only read: what they were worth before the call.
  std::vector<std::pair<at::Tensor, int>> inputs;
  // Worth of the result.
  int grade = KNOWN;
  bool is_small = true;
  bool has_device = false;
  bool is_fake = false;
  bool is_in_place = false;
  // Tensors that it writes to, in place or as `out`.
  std::vector<at::Tensor> written;
  bool has_launched = false;

  Call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack)
      : op(op), below(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect)),
        stack(stack) {}

  void redispatch() { op.redispatchBoxed(below, stack); }

  // A launch makes all storages unknown that it may write to; an operator only writes to its tensors.
  void redispatch_exactly() {
    library().hold();
    try {
      op.redispatchBoxed(below, stack);
    } catch (...) {
      library().release();
      throw;
    }
    has_launched = library().release() != 0;
    if (!has_launched) return;
    for (const at::Tensor& tensor : written) set_unknown(tensor);
  }

  // Looks at the arguments; false if none of them is on the device, or they are tensors of Python's making.
  bool look(Kind kind) {
    const auto& formal = op.schema().arguments();
    const auto values = torch::jit::last(*stack, formal.size());
    for (const auto& value : values) {
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        has_device |= is_device(tensor);
        // A fake tensor has the device's name and no memory: its operators only work out shapes.
        is_fake |= tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
      });
    }
    if (!has_device || is_fake) return false;
    const int64_t limit = most_bytes.load(std::memory_order_relaxed);
    for (size_t i = 0; i < formal.size(); ++i) {
      const auto* information = formal[i].alias_info();
      const bool is_written = information != nullptr && information->isWrite();
      const bool is_output = is_written && formal[i].kwarg_only();
      is_in_place |= is_written && !is_output;
      for_each_tensor(values[i], [&](const at::Tensor& tensor) {
        if (!is_device(tensor)) return;
        if (is_written && kind != Kind::READS) written.push_back(tensor);
        if (is_output) return;
        if (!is_plain(tensor) || bytes_of(tensor) > limit) {
          is_small = false;
          return;
        }
        if (is_written && (kind == Kind::OVERWRITES || kind == Kind::RANDOM || kind == Kind::READS)) return;
        const int before = grade_of(tensor);
        grade = worse(grade, before);
        if (!is_written && before != UNKNOWN) inputs.emplace_back(tensor, before);
      });
    }
    return true;
  }

  void keep_arguments() {
    const auto values = torch::jit::last(*stack, op.schema().arguments().size());
    arguments.assign(values.begin(), values.end());
  }

  void restore_inputs() {
    for (const auto& [tensor, before] : inputs) set_grade(tensor, before);
  }

  // Runs the operator on CPU tensors over the arguments' bytes; what it returns is left on the stack that is returned.
  Stack run_on_cpu(const at::Generator* generator = nullptr) {
    Stack values;
    values.reserve(arguments.size());
    for (const auto& argument : arguments) values.push_back(on_cpu(argument));
    if (generator != nullptr) {
      const auto& formal = op.schema().arguments();
      for (size_t i = 0; i < formal.size(); ++i) {
        if (formal[i].name() == "generator") values[i] = *generator;
      }
    }
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    op.callBoxed(&values);
    num_run.fetch_add(1, std::memory_order_relaxed);
    return values;
  }

  // Moves what the CPU returned to the device's results.
  void take(Stack& found) {
    const auto& returns = op.schema().returns();
    auto results = stack->end() - static_cast<int64_t>(returns.size());
    for (size_t i = 0; i < returns.size(); ++i, ++results) {
      const auto* information = returns[i].alias_info();
      if (information != nullptr && information->isWrite()) continue;
      *results = taken(found[i], *results);
    }
    for_each_written([&](const at::Tensor& tensor) { set_grade(tensor, grade); });
  }

  template <class Visit>
  void for_each_written(Visit visit) {
    const auto& formal = op.schema().arguments();
    for (size_t i = 0; i < formal.size(); ++i) {
      const auto* information = formal[i].alias_info();
      if (information != nullptr && information->isWrite()) for_each_tensor(arguments[i], visit);
    }
  }

 private:
  c10::IValue taken(const c10::IValue& found, const c10::IValue& result) {
    if (found.isTensor()) return taken(found.toTensor(), result.toTensor());
    if (found.isTensorList()) {
      c10::List<at::Tensor> list;
      const auto from = found.toTensorVector();
      const auto to = result.toTensorVector();
      for (size_t i = 0; i < from.size(); ++i) list.push_back(taken(from[i], to[i]));
      return list;
    }
    return found;
  }

  at::Tensor taken(const at::Tensor& found, const at::Tensor& result) {
    if (!found.defined() || !is_device(result)) return result;
    at::Tensor target = result;
    if (target.sizes() != found.sizes()) target = at::empty(found.sizes(), result.options());
    alias(target).copy_(found);
    set_grade(target, grade);
    return target;
  }
};

void tell_failure(const c10::OperatorHandle& op, const std::exception& error) {
  static std::mutex lock;
  static std::set<std::string> told;
  const std::string name = op.schema().operator_name().name;
  const std::lock_guard<std::mutex> guard(lock);
  if (!told.insert(name).second) return;
  const std::string reason = error.what();
  const std::string text = name + " was not computed on the CPU: " + reason.substr(0, reason.find('\n'));
  library().note(text.c_str());
}

// The number that an operator with such a result asks the device for.
int64_t count_of(const c10::IValue& result) {
  if (!result.isTensor()) return result.toBool() ? 1 : 0;
  const at::Tensor& tensor = result.toTensor();
  return tensor.dim() > 0 ? tensor.size(0) : tensor.numel();
}

void run(Kind kind, const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  Call call(op, keys, stack);
  if (!is_on.load(std::memory_order_relaxed) || !call.look(kind)) return call.redispatch();
  if (kind == Kind::READS) {
    call.redispatch();
    return call.restore_inputs();
  }
  // A copy to the host, which may have operators of its own before it.
  const auto& first = torch::jit::last(*stack, op.schema().arguments().size())[0];
  if (kind == Kind::OVERWRITES && first.isTensor() && !is_device(first.toTensor()) && call.is_in_place) {
    return call.redispatch();
  }
  // What an outer operator changes in place is its own affair.
  const bool runs = call.is_small && call.grade != UNKNOWN && !(depth > 0 && call.is_in_place);
  if (!runs) return call.redispatch_exactly();
  call.keep_arguments();
  Stack found;
  if (kind == Kind::SHAPE) {
    try {
      found = call.run_on_cpu();
    } catch (const std::exception& error) {
      tell_failure(op, error);
      return call.redispatch_exactly();
    }
    library().script(count_of(found[0]), 1);
  }
  try {
    const Deeper deeper;
    call.redispatch_exactly();
  } catch (...) {
    if (kind == Kind::SHAPE) library().script(0, 0);
    throw;
  }
  if (kind == Kind::SHAPE) library().script(0, 0);
  try {
    bool fits = true;
    call.for_each_written([&](const at::Tensor& tensor) {
      fits = fits && (!is_device(tensor) || (is_plain(tensor) && bytes_of(tensor) <= most_bytes.load()));
    });
    // A copy or a fill by the copy engine really moves bytes.
    if (kind == Kind::OVERWRITES && !call.has_launched) fits = false;
    if (fits) {
      if (kind != Kind::SHAPE) found = call.run_on_cpu();
      call.take(found);
    }
  } catch (const std::exception& error) {
    tell_failure(op, error);
  }
}

template <Kind kind>
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  run(kind, op, keys, stack);
}

// Random numbers: the device's generator gives the seed and the place in its sequence, so that programs which seed their
// ranks alike (or differently) find them so. The numbers are not those of a GPU.
void random(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  Call call(op, keys, stack);
  if (!is_on.load(std::memory_order_relaxed) || depth > 0 || !call.look(Kind::RANDOM)) return call.redispatch();
  call.keep_arguments();
  at::Generator device;
  for (const auto& argument : call.arguments) {
    if (argument.isGenerator()) device = argument.toGenerator();
  }
  bool is_small = call.is_small;
  call.for_each_written([&](const at::Tensor& tensor) {
    if (!is_device(tensor)) return;
    if (!device.defined()) device = at::globalContext().defaultGenerator(tensor.device());
  });
  uint64_t seed = 0;
  uint64_t offset = 0;
  try {
    if (device.defined()) {
      seed = device.current_seed();
      offset = device.get_offset();
    }
  } catch (const std::exception&) {
    // A stream is being captured: the place in the sequence is decided when the graph runs.
    call.is_small = is_small = false;
  }
  call.redispatch_exactly();
  call.for_each_written([&](const at::Tensor& tensor) {
    const int64_t limit = c10::isIntegralType(tensor.scalar_type(), true) ? most_bytes.load() : MOST_RANDOM_FLOAT_BYTES;
    is_small = is_small && (!is_device(tensor) || (is_plain(tensor) && bytes_of(tensor) <= limit));
  });
  if (!is_small || call.grade == UNKNOWN) return;
  try {
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU).clone();
    generator.set_current_seed(seed * 0x9E3779B97F4A7C15ULL + offset);
    static const int rule = library().rule("random numbers of the CPU");
    call.grade = rule;
    Stack found = call.run_on_cpu(&generator);
    call.take(found);
  } catch (const std::exception& error) {
    tell_failure(op, error);
  }
}

// Gradients are not known: they are taken to be finite, but at the updates that a rule names.
void unscale(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (!is_on.load(std::memory_order_relaxed)) return Call(op, keys, stack).redispatch();
  const at::Tensor found_inf = torch::jit::peek(*stack, 1, 3).toTensor();
  const at::Tensor inverse_scale = torch::jit::peek(*stack, 2, 3).toTensor();
  const int scale_grade = grade_of(inverse_scale);
  const bool was_known = grade_of(found_inf) != UNKNOWN;
  Call(op, keys, stack).redispatch();
  set_grade(inverse_scale, scale_grade);
  if (!is_device(found_inf) || found_inf.scalar_type() != at::kFloat || found_inf.numel() != 1) return;
  bool is_overflow = false;
  {
    const std::lock_guard<std::mutex> guard(overflow_lock);
    is_overflow = overflows.count(num_scale_updates.load()) != 0;
  }
  static const int healthy = library().rule("loss scale: gradients are finite");
  static const int scheduled = library().rule("loss scale: overflow by schedule");
  const at::Tensor value = alias(found_inf);
  const bool was_set = was_known && *value.const_data_ptr<float>() != 0;
  *value.mutable_data_ptr<float>() = is_overflow || was_set ? 1 : 0;
  set_grade(found_inf, is_overflow ? scheduled : healthy);
}

void update_scale(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  // The same operator on the CPU comes by here, too.
  const bool counts = is_device(torch::jit::last(*stack, op.schema().arguments().size())[0].toTensor());
  run(Kind::PLAIN, op, keys, stack);
  if (counts) num_scale_updates.fetch_add(1);
}

// Gives the result of an operator, where it is not known, a value that a healthy run has.
void healthy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack, bool applies, double value,
             const char* name) {
  run(Kind::PLAIN, op, keys, stack);
  if (!applies || !is_on.load(std::memory_order_relaxed)) return;
  const at::Tensor result = torch::jit::peek(*stack, 0, 1).toTensor();
  const bool fits = is_device(result) && is_plain(result) && result.is_non_overlapping_and_dense() &&
      bytes_of(result) <= most_bytes.load();
  if (!fits || grade_of(result) != UNKNOWN) return;
  alias(result).fill_(value);
  set_grade(result, library().rule(name));
}

bool is_float(const at::Tensor& tensor) {
  return is_device(tensor) && c10::isFloatingType(tensor.scalar_type());
}

constexpr const char* NO_NAN = "no value is NaN";
constexpr const char* FINITE = "values are finite";

// A healthy run has no NaN.
void is_nan(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const at::Tensor input = torch::jit::peek(*stack, 0, 1).toTensor();
  healthy(op, keys, stack, is_device(input), 0, NO_NAN);
}

// `x == x` and `x != x` ask for NaN, as `torch.isfinite` does.
template <bool IS_EQUAL>
void compare(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const at::Tensor left = torch::jit::peek(*stack, 0, 2).toTensor();
  const at::Tensor right = torch::jit::peek(*stack, 1, 2).toTensor();
  const bool is_same = left.is_same(right) ||
      (is_float(left) && is_float(right) && is_plain(left) && is_plain(right) &&
       left.const_data_ptr() == right.const_data_ptr() && left.sizes() == right.sizes() &&
       left.strides() == right.strides() && left.scalar_type() == right.scalar_type());
  healthy(op, keys, stack, is_same && is_float(left), IS_EQUAL ? 1 : 0, NO_NAN);
}

// `|x| == inf` and `|x| != inf` ask for overflows, as `torch.isinf` and `torch.isfinite` do.
template <bool IS_EQUAL>
void compare_scalar(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const at::Tensor left = torch::jit::peek(*stack, 0, 2).toTensor();
  const at::Scalar right = torch::jit::peek(*stack, 1, 2).toScalar();
  const bool asks = is_float(left) && right.isFloatingPoint() && std::isinf(right.toDouble());
  healthy(op, keys, stack, asks, IS_EQUAL ? 0 : 1, FINITE);
}

// Norms of gradients decide whether a step is made and how far: a healthy run's are positive and finite.
void vector_norm(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto count = op.schema().arguments().size();
  const at::Tensor input = torch::jit::last(*stack, count)[0].toTensor();
  healthy(op, keys, stack, is_float(input), 1, "a norm is 1");
}

const char* const PLAIN[] = {
    "add.Tensor", "add_.Tensor", "add.out", "sub.Tensor", "sub_.Tensor", "sub.out", "mul.Tensor", "mul_.Tensor",
    "mul.out", "div.Tensor", "div_.Tensor", "div.out", "rsub.Tensor", "div.Tensor_mode", "div_.Tensor_mode",
    "floor_divide", "remainder.Tensor", "remainder.Scalar", "fmod.Tensor", "lt.Tensor", "lt.Scalar", "le.Tensor",
    "le.Scalar", "gt.Tensor", "gt.Scalar", "ge.Tensor",
    "ge.Scalar", "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_not", "logical_not.out",
    "logical_and.out", "bitwise_and.Tensor", "bitwise_and_.Tensor", "bitwise_and.Scalar", "bitwise_or.Tensor",
    "bitwise_or_.Tensor", "bitwise_or.Scalar", "bitwise_xor.Tensor", "bitwise_xor_.Tensor", "bitwise_xor.Scalar",
    "bitwise_left_shift.Tensor", "bitwise_right_shift.Tensor", "__lshift__.Scalar", "__rshift__.Scalar", "abs", "neg",
    "sqrt", "rsqrt", "reciprocal", "exp", "log", "log2", "ceil", "floor", "round", "sign", "sin", "cos", "sigmoid",
    "trunc", "tanh", "relu", "reciprocal_", "sqrt_", "neg_", "exp_", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "where.self", "masked_fill.Scalar", "masked_fill.Tensor", "masked_fill_.Scalar",
    "masked_fill_.Tensor", "masked_select", "masked_scatter", "clamp", "clamp.Tensor", "clamp_", "clamp_min",
    "clamp_max", "clamp_min.Tensor", "clamp_max.Tensor", "clamp_min_", "clamp_max_", "maximum", "minimum", "fmax",
    "fmin", "sum", "sum.dim_IntList", "mean", "mean.dim", "prod", "prod.dim_int", "max", "min", "max.dim", "min.dim",
    "amax", "amin", "aminmax", "argmax", "argmin", "any", "any.dim", "all", "all.dim", "count_nonzero.dim_IntList",
    "std.correction", "var.correction", "logsumexp", "cumsum", "cumsum.out", "cumprod",
    "cumsum_", "sort", "sort.stable", "topk", "kthvalue", "index.Tensor", "index_put_", "_index_put_impl_",
    "index_put", "index_select", "index_add_", "index_add", "index_fill_.int_Scalar", "index_copy_", "gather",
    "scatter.src", "scatter.value", "scatter_.src", "scatter_.value", "scatter.reduce", "scatter_add", "scatter_add_",
    "scatter_reduce.two", "scatter_reduce_.two", "take", "bincount", "histc", "repeat_interleave.Tensor",
    "searchsorted.Tensor", "searchsorted.Scalar", "bucketize.Tensor", "tril", "triu", "tril_", "triu_", "cat", "flip",
    "roll", "_softmax", "_log_softmax", "addcmul", "addcdiv", "lerp.Scalar", "lerp.Tensor", "isin.Tensor_Tensor",
    "_to_copy", "clone", "constant_pad_nd", "isposinf", "isneginf",
};
const char* const OVERWRITES[] = {
    "fill_.Scalar", "fill_.Tensor", "zero_", "copy_", "arange.start_out", "linspace.out", "eye.m_out", "eye.out",
};
const char* const SHAPE[] = {"nonzero", "_unique2", "unique_consecutive", "unique_dim", "equal"};
const char* const RANDOM[] = {
    "random_", "random_.from", "random_.to", "uniform_", "normal_", "bernoulli_.float", "exponential_",
    "randperm.generator_out", "multinomial",
};
const char* const READS[] = {
    "embedding", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward",
    "embedding_dense_backward", "_softmax_backward_data", "_log_softmax_backward_data", "_scaled_mm", "_grouped_mm",
    "_fused_adam_", "_fused_adam_.tensor_lr", "_fused_adamw_", "_fused_adamw_.tensor_lr", "_foreach_mul_.Tensor",
    "_foreach_div_.Tensor", "native_dropout", "grid_sampler_2d",
};

TORCH_LIBRARY_IMPL(aten, BackendSelect, m) {
  for (const char* name : PLAIN) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed<Kind::PLAIN>>());
  for (const char* name : OVERWRITES) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed<Kind::OVERWRITES>>());
  for (const char* name : SHAPE) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed<Kind::SHAPE>>());
  for (const char* name : READS) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&boxed<Kind::READS>>());
  for (const char* name : RANDOM) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&random>());
  m.impl("_amp_foreach_non_finite_check_and_unscale_", torch::CppFunction::makeFromBoxedFunction<&unscale>());
  m.impl("_amp_update_scale_", torch::CppFunction::makeFromBoxedFunction<&update_scale>());
  m.impl("isnan", torch::CppFunction::makeFromBoxedFunction<&is_nan>());
  m.impl("eq.Tensor", torch::CppFunction::makeFromBoxedFunction<&compare<true>>());
  m.impl("ne.Tensor", torch::CppFunction::makeFromBoxedFunction<&compare<false>>());
  m.impl("eq.Scalar", torch::CppFunction::makeFromBoxedFunction<&compare_scalar<true>>());
  m.impl("ne.Scalar", torch::CppFunction::makeFromBoxedFunction<&compare_scalar<false>>());
  m.impl("linalg_vector_norm", torch::CppFunction::makeFromBoxedFunction<&vector_norm>());
}

}  // namespace

// For the framework hook, by ctypes.
#define EXPORTED __attribute__((visibility("default")))

extern "C" {

// Starts the plane; 0, or -1 without the preloaded library.
EXPORTED int prism_plane_start() {
  if (!library().complete()) return -1;
  is_on = true;
  return 0;
}

// Tensors of up to so many bytes are computed with.
EXPORTED void prism_plane_set_most_bytes(int64_t bytes) {
  most_bytes = bytes;
}

// Gradients overflow before this update of the loss scale, counted from 0.
EXPORTED void prism_plane_add_overflow(int64_t update) {
  const std::lock_guard<std::mutex> guard(overflow_lock);
  overflows.insert(update);
}

// How many operators ran on the CPU.
EXPORTED uint64_t prism_plane_num_run() {
  return num_run;
}
}
