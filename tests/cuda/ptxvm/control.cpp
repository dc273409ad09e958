// Branches, calls, the end of threads, and the few functions the device run time provides.
#include "access.h"
#include "decode.h"
#include "device_printf.h"
#include "statistics.h"
#include <algorithm>

namespace ptxvm {

namespace {

void branch(Context &c, const Instruction &i, uint32_t mask) {
  if (c.counters) count_branch(*c.counters, mask != c.group->mask);
  if (mask != c.group->mask) {
    split_from_group(c, mask);
    c.stop = true;
  }
  c.group->pc = i.target;
}

void branch_indexed(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *index = c.lanes(i.src[0]);
  split_from_group(c, mask);
  if (c.counters) {
    bool same = true;
    for_lanes(mask, [&](int l) { same &= index[l] == index[__builtin_ctz(mask)]; });
    count_branch(*c.counters, !same);
  }
  for (uint32_t left = mask; left;) {
    uint64_t value = index[__builtin_ctz(left)] & 0xffffffff;
    uint32_t lanes = 0;
    for_lanes(left, [&](int l) { lanes |= static_cast<uint32_t>((index[l] & 0xffffffff) == value) << l; });
    if (value >= i.extra->targets.size()) fault(c, i, __builtin_ctz(left), "brx.idx beyond its table");
    left &= ~lanes;
    int target = i.extra->targets[value];
    if (left) {
      Group part = *c.group;
      part.mask = lanes;
      part.pc = target;
      c.warp->groups.push_back(part);
      c.stop = true;
    } else {
      c.group->mask = lanes;
      c.group->pc = target;
    }
  }
}

void exit_thread(Context &c, const Instruction &, uint32_t mask) { lanes_exit(c, mask); }

void return_from(Context &c, const Instruction &, uint32_t mask) {
  const Frame *frame = c.group->frame;
  if (!frame->parent) return lanes_exit(c, mask);
  split_from_group(c, mask);
  const Function &callee = *frame->code->function;
  if (callee.result_size && frame->call->extra->result_offset >= 0) {
    uint64_t from = frame->local_base + align_up(static_cast<uint64_t>(callee.param_size), kParamAlign);
    uint64_t to = frame->parent->local_base + static_cast<uint64_t>(frame->call->extra->result_offset);
    for_lanes(mask, [&](int l) {
      memcpy(c.warp->local_bytes(l, to), c.warp->local_bytes(l, from), static_cast<size_t>(callee.result_size));
    });
  }
  c.group->frame = frame->parent;
  c.group->pc = frame->return_pc;
  c.enter(frame->parent);
  c.stop = true;
}

void enter_function(Context &c, const Instruction &i, uint32_t mask, const Function *callee) {
  const Code *code = c.launch->program->code_of(callee);
  const Frame *caller = c.group->frame, *frame = c.warp->push_frame(caller, code, &i, c.group->pc);
  const auto &arguments = i.extra->copies;
  if (arguments.size() != callee->params.size())
    fault(c, i, __builtin_ctz(mask), "call of %s with %zu arguments", callee->name.c_str(), arguments.size());
  for (size_t k = 0; k < arguments.size(); k++) {
    uint64_t from = caller->local_base + static_cast<uint64_t>(arguments[k].first);
    uint64_t to = frame->local_base + static_cast<uint64_t>(callee->params[k].offset);
    size_t size = static_cast<size_t>(std::min(callee->params[k].size, arguments[k].second));
    for_lanes(mask, [&](int l) { memcpy(c.warp->local_bytes(l, to), c.warp->local_bytes(l, from), size); });
  }
  c.group->frame = frame;
  c.group->pc = 0;
  c.enter(frame);
  c.stop = true;
}

void call_direct(Context &c, const Instruction &i, uint32_t mask) {
  split_from_group(c, mask);
  enter_function(c, i, mask, i.extra->callee);
}

void call_indirect(Context &c, const Instruction &i, uint32_t mask) {
  const Lane *address = c.lanes(i.src[0]);
  split_from_group(c, mask);
  uint64_t value = address[__builtin_ctz(mask)];
  uint32_t lanes = 0;
  for_lanes(mask, [&](int l) { lanes |= static_cast<uint32_t>(address[l] == value) << l; });
  if (lanes != mask) { // the others come back to this instruction
    Group rest = *c.group;
    rest.mask = mask & ~lanes;
    rest.pc--;
    c.group->mask = lanes;
    c.warp->groups.push_back(rest);
  }
  for (auto &entry : c.launch->program->kernel->module->functions) {
    Function *callee = entry.second.get();
    if (callee->id != value) continue;
    parse_body(*callee);
    return enter_function(c, i, lanes, callee);
  }
  fault(c, i, __builtin_ctz(mask), "call through 0x%llx, which is no function", static_cast<unsigned long long>(value));
}

// A pointer-sized argument of a call to the run time.
uint64_t argument(Context &c, const Instruction &i, int lane, size_t k) {
  uint64_t value = 0;
  auto place = i.extra->copies[k];
  memcpy(&value, c.warp->local_bytes(lane, c.group->frame->local_base + static_cast<uint64_t>(place.first)),
         static_cast<size_t>(std::min(place.second, 8)));
  return value;
}

std::string device_string(uint64_t address) {
  const Allocation *a = device_memory().find(address);
  if (!a || a->freed) return "(not a string)";
  const char *text = reinterpret_cast<const char *>(address + static_cast<uint64_t>(a->alias_delta));
  return std::string(text, strnlen(text, a->base + a->size - address));
}

const uint8_t *argument_buffer(Context &c, int lane, uint64_t address, size_t *size) {
  if (address >> kWindowShift == kLocalWindow >> kWindowShift) {
    uint64_t offset = address & 0xffffffff;
    *size = c.warp->local_stride - offset;
    return c.warp->local_bytes(lane, offset);
  }
  *size = 0;
  return nullptr;
}

void call_printf(Context &c, const Instruction &i, uint32_t mask) {
  for_lanes(mask, [&](int l) {
    size_t size;
    const uint8_t *buffer = argument_buffer(c, l, argument(c, i, l, 1), &size);
    uint64_t format = argument(c, i, l, 0);
    int written = format ? print_device(device_string(format), buffer, size, device_string) : -1;
    if (i.extra->result_offset >= 0)
      memcpy(c.warp->local_bytes(l, c.group->frame->local_base + static_cast<uint64_t>(i.extra->result_offset)),
             &written, sizeof written);
  });
}

void call_assert(Context &c, const Instruction &i, uint32_t mask) {
  int l = __builtin_ctz(mask);
  fault(c, i, l, "device assert '%s' failed, %s:%d", device_string(argument(c, i, l, 0)).c_str(),
        device_string(argument(c, i, l, 1)).c_str(), static_cast<int>(argument(c, i, l, 2) & 0xffffffff));
}

void trap(Context &c, const Instruction &i, uint32_t mask) { fault(c, i, __builtin_ctz(mask), "trap"); }

void sleep_a_little(Context &c, const Instruction &, uint32_t) {
  c.block->wants_yield = true;
  c.stop = true;
}

void nothing(Context &, const Instruction &, uint32_t) {}

int label_target(const Decoder &d, const std::string &name) {
  auto it = d.function.labels.find(name);
  if (it == d.function.labels.end()) d.unsupported("unknown label " + name);
  return it->second;
}

void decode_branch(Decoder &d) {
  d.take("uni");
  d.out.target = label_target(d, d.operand(0).name);
  d.out.handler = branch;
}

void decode_branch_indexed(Decoder &d) {
  d.ignore({"idx", "uni"});
  d.source(0, 0);
  auto table = d.function.branch_targets.find(d.operand(1).name);
  if (table == d.function.branch_targets.end()) d.unsupported("unknown branch table");
  for (const std::string &label : table->second) d.extra().targets.push_back(label_target(d, label));
  d.out.handler = branch_indexed;
}

void decode_call(Decoder &d) {
  d.take("uni");
  size_t k = 0;
  Extra &extra = d.extra();
  if (d.operand(0).kind == Operand::Vector) {
    if (!d.operand(0).elements.empty())
      extra.result_offset = static_cast<int>(d.operand(0).elements[0].symbol->address);
    k = 1;
  }
  const Operand &target = d.operand(k);
  if (d.has(k + 1) && d.operand(k + 1).kind == Operand::Vector)
    for (const Operand &o : d.operand(k + 1).elements) {
      if (!o.symbol) d.unsupported("an argument that is not a variable");
      extra.copies.emplace_back(static_cast<int>(o.symbol->address), static_cast<int>(o.symbol->size));
    }
  if (target.kind == Operand::Register) {
    d.source(0, k);
    d.out.handler = call_indirect;
  } else if (target.name == "vprintf") {
    d.out.handler = call_printf;
  } else if (target.name == "__assertfail") {
    d.out.handler = call_assert;
  } else {
    extra.callee = d.function.module->find(target.name);
    if (!extra.callee || !extra.callee->has_body) d.unsupported("call of the undefined function " + target.name);
    d.out.handler = call_direct;
  }
}

} // namespace

void add_control_instructions(DecodeTable &t) {
  t["bra"] = decode_branch;
  t["brx"] = decode_branch_indexed;
  t["call"] = decode_call;
  t["ret"] = [](Decoder &d) { d.take("uni"), d.out.handler = return_from; };
  t["exit"] = [](Decoder &d) { d.out.handler = exit_thread; };
  t["trap"] = [](Decoder &d) { d.out.handler = trap; };
  t["brkpt"] = [](Decoder &d) { d.out.handler = nothing; };
  t["griddepcontrol"] = [](Decoder &d) { d.ignore({"launch_dependents", "wait"}), d.out.handler = nothing; };
  t["setmaxnreg"] = [](Decoder &d) { d.ignore({"inc", "dec", "sync", "aligned", "u32"}), d.out.handler = nothing; };
  t["nanosleep"] = [](Decoder &d) { d.take_type(), d.out.handler = sleep_a_little; };
}

} // namespace ptxvm
