//! What a running process executes in user space, all its threads, by ptrace(2). x86-64 only. All `unsafe` of this crate.
//!
//! Single steps would be plainer and ten times slower: on a virtual machine each is a visit to the hypervisor. So every branch that
//! is met gets a breakpoint, and keeps it. From one stop to the next there is then one way, whose instructions are counted once, when
//! it is first gone; the branch at its end is worked out here and never executed. A repeated string instruction is one.
//!
//! All this takes a thousand times longer than without. So the process's clocks stand still meanwhile, and none of its time-outs
//! ends, on however slow a machine.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use iced_x86::{Code, ConditionCode, Decoder, DecoderOptions, FlowControl, Instruction, OpKind, Register};
use libc::{c_int, c_uint, c_void, pid_t, user_regs_struct};

use crate::stacks::{Part, Stacks};

/// An operation's work has ended when nothing has come out of the kernel for so long.
const QUIET: Duration = Duration::from_millis(50);
/// How often it is asked for, while all threads are in the kernel.
const ASK: Duration = Duration::from_micros(50);
const BREAKPOINT: u8 = 0xcc;
const LONGEST_INSTRUCTION: usize = 15;
/// More without a branch is a loop that nothing ends.
const LONGEST_WAY: u64 = 100_000;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Count {
    pub instructions: u64,
    /// System calls, by number.
    pub calls: BTreeMap<u64, u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Thread {
    /// On the way that begins at this address.
    On(u64),
    InKernel,
}

/// From an address to the next stop: a branch that is not always the same, or a system call. Its last instruction.
struct Way {
    instructions: u64,
    end: u64,
    /// Which functions it goes through.
    parts: Vec<Part>,
}

/// A process of several threads. It dies with the thread that traces it.
pub struct Tracee {
    threads: HashMap<pid_t, Thread>,
    memory: File,
    /// By where they begin.
    ways: HashMap<u64, Way>,
    /// Those that have a breakpoint, by address.
    branches: HashMap<u64, Instruction>,
    /// What each clock showed when it was first read, by its id.
    clocks: HashMap<u64, [u8; 16]>,
    count: Count,
    stacks: Option<Stacks>,
    /// Where in the tree of the stacks each thread is.
    places: HashMap<pid_t, u32>,
}

impl Tracee {
    pub fn attach(pid: u32) -> Result<Self> {
        let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
        let options = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_TRACESYSGOOD;
        let mut seized = HashSet::new();
        // Until none is new; who is seized passes that on to those it starts.
        loop {
            let before = seized.len();
            for entry in fs::read_dir(format!("/proc/{pid}/task"))? {
                let tid: pid_t = entry?.file_name().to_string_lossy().parse()?;
                if seized.insert(tid) {
                    ptrace(libc::PTRACE_SEIZE, tid, 0, options as usize as *mut c_void)?;
                    ptrace(libc::PTRACE_INTERRUPT, tid, 0, NOTHING)?;
                }
            }
            if seized.len() == before {
                break;
            }
        }
        let mut tracee = Tracee {
            threads: seized.into_iter().map(|tid| (tid, Thread::InKernel)).collect(),
            memory,
            ways: HashMap::new(),
            branches: HashMap::new(),
            clocks: HashMap::new(),
            count: Count::default(),
            stacks: None,
            places: HashMap::new(),
        };
        // Some calls end early when they are interrupted; what follows of that does not count.
        tracee.count(|| true)?;
        tracee.stop_clocks(pid)?;
        Ok(tracee)
    }

    /// Counts from now on also which functions execute the instructions.
    pub fn count_stacks(&mut self, pid: u32) -> Result<()> {
        self.stacks = Some(Stacks::new(pid)?);
        Ok(())
    }

    /// Returns the instructions of each call stack since the last call.
    pub fn take_stacks(&mut self) -> BTreeMap<String, u64> {
        self.stacks.as_mut().map(Stacks::take).unwrap_or_default()
    }

    /// Have the clocks read by a system call, at whose stop they can be answered.
    fn stop_clocks(&mut self, pid: u32) -> Result<()> {
        /// mov eax, SYS_clock_gettime; syscall; ret
        const CODE: [u8; 8] = [0xb8, libc::SYS_clock_gettime as u8, 0, 0, 0, 0x0f, 0x05, 0xc3];
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let vdso = maps.lines().find(|line| line.ends_with("[vdso]")).and_then(|line| line.split('-').next());
        let vdso = u64::from_str_radix(vdso.context("no vdso is mapped")?, 16)?;
        let read_clock = vdso + vdso_clock_gettime().context("no clock_gettime in the vdso")?;
        self.memory.write_all_at(&CODE, read_clock)?;
        // What was met there already is no more.
        self.ways.clear();
        self.branches.retain(|at, _| !(read_clock..read_clock + CODE.len() as u64).contains(at));
        Ok(())
    }

    /// What is executed until `ended` and all is quiet.
    pub fn count(&mut self, ended: impl Fn() -> bool) -> Result<Count> {
        self.count = Count::default();
        let mut stopped = Instant::now();
        loop {
            let all_in_kernel = self.threads.values().all(|thread| *thread == Thread::InKernel);
            match wait(if all_in_kernel { libc::WNOHANG } else { 0 })? {
                Some((tid, status)) => {
                    self.stopped(tid, status)?;
                    stopped = Instant::now();
                }
                None if stopped.elapsed() > QUIET && ended() => return Ok(std::mem::take(&mut self.count)),
                None => std::thread::sleep(ASK),
            }
        }
    }

    /// A thread has stopped: count what it did, and let it go on.
    fn stopped(&mut self, tid: pid_t, status: c_int) -> Result<()> {
        if !libc::WIFSTOPPED(status) {
            self.threads.remove(&tid);
            self.places.remove(&tid);
            ensure!(!self.threads.is_empty(), "csid ended while it was counted");
            return Ok(());
        }
        let mut now = registers(tid)?;
        let next = match (libc::WSTOPSIG(status), status >> 16) {
            (SYSCALL_STOP, _) if enters_call(tid)? => {
                *self.count.calls.entry(now.orig_rax).or_default() += 1;
                self.came(tid, now.rip - SYSCALL_LENGTH)?;
                wait_for_ever(&mut now);
                ptrace(libc::PTRACE_SETREGS, tid, 0, (&raw mut now).cast())?;
                Thread::InKernel
            }
            (SYSCALL_STOP, _) => {
                // A read that found nothing yet is made again later. How often depends on when the other side answers.
                let is_read = [libc::SYS_recvmsg, libc::SYS_recvfrom].contains(&now.orig_rax.cast_signed());
                if is_read
                    && now.rax.cast_signed() == -i64::from(libc::EAGAIN)
                    && let Some(calls) = self.count.calls.get_mut(&now.orig_rax)
                {
                    *calls = calls.saturating_sub(1);
                }
                if now.orig_rax == libc::SYS_clock_gettime as u64 && now.rax == 0 {
                    self.show_clock(now.rdi, now.rsi)?;
                }
                Thread::On(now.rip)
            }
            (libc::SIGTRAP, 0) => {
                let at = now.rip - 1;
                self.came(tid, at)?;
                self.take_branch(at, &mut now)?;
                self.turned(tid, at, now.rip);
                ptrace(libc::PTRACE_SETREGS, tid, 0, (&raw mut now).cast())?;
                Thread::On(now.rip)
            }
            // It is interrupted, and its call will be made again; or it is new.
            (_, libc::PTRACE_EVENT_STOP) if RESTARTS.contains(&(now.rax as i64)) => Thread::InKernel,
            (_, libc::PTRACE_EVENT_STOP) => Thread::On(now.rip),
            (_, libc::PTRACE_EVENT_CLONE) => Thread::InKernel,
            (signal, _) => bail!("csid got signal {signal} while it was counted"),
        };
        if let Thread::On(start) = next {
            self.way(start)?;
        }
        self.threads.insert(tid, next);
        ptrace(libc::PTRACE_SYSCALL, tid, 0, NOTHING)
    }

    /// A clock was read to `to`: what it showed first is there afterwards.
    fn show_clock(&mut self, clock: u64, to: u64) -> Result<()> {
        let mut time = [0; 16];
        self.memory.read_exact_at(&mut time, to)?;
        Ok(self.memory.write_all_at(self.clocks.entry(clock).or_insert(time), to)?)
    }

    /// A thread has come to where its way ends.
    fn came(&mut self, tid: pid_t, to: u64) -> Result<()> {
        if let Some(Thread::On(start)) = self.threads.get(&tid) {
            let way = &self.ways[start];
            ensure!(way.end == to, "the way from {start:#x} ends at {to:#x} and not at {:#x}", way.end);
            self.count.instructions += way.instructions;
            if let Some(stacks) = &mut self.stacks {
                let place = self.places.entry(tid).or_default();
                *place = stacks.gone(*place, &way.parts);
            }
        }
        Ok(())
    }

    /// Follows a thread's branch at `at` to `to` in the tree of the stacks.
    fn turned(&mut self, tid: pid_t, at: u64, to: u64) {
        if let (Some(stacks), Some(branch)) = (&mut self.stacks, self.branches.get(&at)) {
            let place = self.places.entry(tid).or_default();
            *place = match branch.flow_control() {
                FlowControl::IndirectCall => stacks.called(*place, to),
                FlowControl::Return => stacks.returned(*place),
                _ => *place,
            };
        }
    }

    /// The way from `start`. The branch at its end gets its breakpoint.
    fn way(&mut self, start: u64) -> Result<()> {
        if self.ways.contains_key(&start) {
            return Ok(());
        }
        let mut at = start;
        let mut parts = Vec::new();
        // Where the run of instructions without a jump began, and how many were before it.
        let mut run = (start, 0);
        for instructions in 1..LONGEST_WAY {
            let found = match self.branches.get(&at) {
                Some(branch) => *branch,
                None => self.decode(at)?,
            };
            let is_call = found.code() == Code::Syscall;
            match found.flow_control() {
                FlowControl::Next => at = found.next_ip(),
                FlowControl::UnconditionalBranch => {
                    at = found.near_branch_target();
                    parts.push(Part::Run(run.0, instructions - run.1));
                    run = (at, instructions);
                }
                FlowControl::Call if !is_call => {
                    at = found.near_branch_target();
                    parts.extend([Part::Run(run.0, instructions - run.1), Part::Call(at)]);
                    run = (at, instructions);
                }
                _ => {
                    if !is_call && self.branches.insert(at, found).is_none() {
                        self.memory.write_all_at(&[BREAKPOINT], at)?;
                    }
                    parts.push(Part::Run(run.0, instructions - run.1));
                    self.ways.insert(start, Way { instructions, end: at, parts });
                    return Ok(());
                }
            }
        }
        bail!("no branch follows {start:#x}");
    }

    fn decode(&self, at: u64) -> Result<Instruction> {
        let mut code = [0; LONGEST_INSTRUCTION];
        let length = self.memory.read_at(&mut code, at).with_context(|| format!("the code at {at:#x}"))?;
        let found = Decoder::with_ip(64, &code[..length], at, DecoderOptions::NONE).decode();
        ensure!(!found.is_invalid(), "no instruction is known at {at:#x}: {code:02x?}");
        Ok(found)
    }

    /// Do to the registers and the stack what the branch at `at` does.
    fn take_branch(&mut self, at: u64, now: &mut user_regs_struct) -> Result<()> {
        let branch = *self.branches.get(&at).with_context(|| format!("a breakpoint of others at {at:#x}"))?;
        now.rip = match branch.flow_control() {
            FlowControl::ConditionalBranch if holds(&branch, now)? => branch.near_branch_target(),
            FlowControl::ConditionalBranch => branch.next_ip(),
            FlowControl::Return => {
                let to = self.read(now.rsp)?;
                now.rsp += 8 + if branch.op_count() == 1 { branch.immediate(0) } else { 0 };
                to
            }
            FlowControl::IndirectBranch => self.target(&branch, now)?,
            FlowControl::IndirectCall => {
                let to = self.target(&branch, now)?;
                now.rsp -= 8;
                self.memory.write_all_at(&branch.next_ip().to_ne_bytes(), now.rsp)?;
                to
            }
            _ => bail!("{:?} at {at:#x} is not known here", branch.code()),
        };
        Ok(())
    }

    fn target(&self, branch: &Instruction, now: &user_regs_struct) -> Result<u64> {
        let value = |register: Register| register_of(register, now);
        let target = match branch.op0_kind() {
            OpKind::Register => value(branch.op0_register()),
            _ => match branch.virtual_address(0, 0, |register, _, _| value(register)) {
                Some(at) => Some(self.read(at)?),
                None => None,
            },
        };
        target.with_context(|| format!("where {:?} at {:#x} goes", branch.code(), branch.ip()))
    }

    fn read(&self, at: u64) -> Result<u64> {
        let mut value = [0; 8];
        self.memory.read_exact_at(&mut value, at)?;
        Ok(u64::from_ne_bytes(value))
    }
}

/// The system call that is about to be made has no time-out: while the clocks stand still none ends. It is the fourth argument.
fn wait_for_ever(now: &mut user_regs_struct) {
    const FUTEX_COMMAND: u64 = !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME) as u32 as u64;
    let waits = [libc::FUTEX_WAIT, libc::FUTEX_WAIT_BITSET].map(|command| command as u64);
    match now.orig_rax as i64 {
        libc::SYS_futex if waits.contains(&(now.rsi & FUTEX_COMMAND)) => now.r10 = 0,
        libc::SYS_epoll_wait if now.r10 as c_int > 0 => now.r10 = u64::MAX,
        _ => {}
    }
}

/// Whether the branch is taken.
fn holds(branch: &Instruction, now: &user_regs_struct) -> Result<bool> {
    let flag = |bit: u32| now.eflags & (1 << bit) != 0;
    let (carry, parity, zero, sign, overflow) = (flag(0), flag(2), flag(6), flag(7), flag(11));
    Ok(match branch.condition_code() {
        ConditionCode::o => overflow,
        ConditionCode::no => !overflow,
        ConditionCode::b => carry,
        ConditionCode::ae => !carry,
        ConditionCode::e => zero,
        ConditionCode::ne => !zero,
        ConditionCode::be => carry || zero,
        ConditionCode::a => !carry && !zero,
        ConditionCode::s => sign,
        ConditionCode::ns => !sign,
        ConditionCode::p => parity,
        ConditionCode::np => !parity,
        ConditionCode::l => sign != overflow,
        ConditionCode::ge => sign == overflow,
        ConditionCode::le => zero || sign != overflow,
        ConditionCode::g => !zero && sign == overflow,
        ConditionCode::None => bail!("{:?} at {:#x} is not known here", branch.code(), branch.ip()),
    })
}

fn register_of(register: Register, now: &user_regs_struct) -> Option<u64> {
    Some(match register {
        Register::RAX => now.rax,
        Register::RBX => now.rbx,
        Register::RCX => now.rcx,
        Register::RDX => now.rdx,
        Register::RSI => now.rsi,
        Register::RDI => now.rdi,
        Register::RBP => now.rbp,
        Register::RSP => now.rsp,
        Register::R8 => now.r8,
        Register::R9 => now.r9,
        Register::R10 => now.r10,
        Register::R11 => now.r11,
        Register::R12 => now.r12,
        Register::R13 => now.r13,
        Register::R14 => now.r14,
        Register::R15 => now.r15,
        Register::FS => now.fs_base,
        Register::CS | Register::DS | Register::ES | Register::SS => 0,
        _ => return None,
    })
}

/// With PTRACE_O_TRACESYSGOOD.
const SYSCALL_STOP: c_int = libc::SIGTRAP | 0x80;
const SYSCALL_LENGTH: u64 = 2;
/// What an interrupted call returns that the kernel makes again: ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND and
/// ERESTART_RESTARTBLOCK, which user space never sees.
const RESTARTS: [i64; 4] = [-512, -513, -514, -516];
const NOTHING: *mut c_void = std::ptr::null_mut();

fn ptrace(request: c_uint, tid: pid_t, size: usize, data: *mut c_void) -> Result<()> {
    // SAFETY: those requests of this file that write to this process have `data` point to what they write.
    if unsafe { libc::ptrace(request, tid, size, data) } == -1 {
        return Err(io::Error::last_os_error()).with_context(|| format!("ptrace request {request:#x}"));
    }
    Ok(())
}

fn registers(tid: pid_t) -> Result<user_regs_struct> {
    // SAFETY: integers, of which zeros are good ones.
    let mut registers: user_regs_struct = unsafe { std::mem::zeroed() };
    ptrace(libc::PTRACE_GETREGS, tid, 0, (&raw mut registers).cast())?;
    Ok(registers)
}

/// Where in the kernel's shared object clock_gettime is; that is the same in each process.
fn vdso_clock_gettime() -> Option<u64> {
    // SAFETY: both names are C strings; the object is mapped in this process from its start to its end.
    let at = unsafe {
        let vdso = libc::dlopen(c"linux-vdso.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        (!vdso.is_null()).then(|| libc::dlsym(vdso, c"__vdso_clock_gettime".as_ptr()))?
    };
    // SAFETY: it only reads.
    let start = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    (at as u64).checked_sub(start)
}

/// Whether the system call stop of this thread is before the call.
fn enters_call(tid: pid_t) -> Result<bool> {
    let mut op = libc::PTRACE_SYSCALL_INFO_NONE;
    // As much as there is room for is written: its first byte.
    let request = libc::PTRACE_GET_SYSCALL_INFO;
    // SAFETY: `op` lives for the call and its size is given.
    if unsafe { libc::ptrace(request, tid, size_of_val(&op), &raw mut op) } == -1 {
        return Err(io::Error::last_os_error()).context("PTRACE_GET_SYSCALL_INFO");
    }
    Ok(op == libc::PTRACE_SYSCALL_INFO_ENTRY)
}

/// The next thread of those that this one traces that has stopped or ended.
fn wait(flags: c_int) -> Result<Option<(pid_t, c_int)>> {
    let mut status = 0;
    // SAFETY: `status` lives for the call.
    match unsafe { libc::waitpid(-1, &raw mut status, flags | libc::__WALL | libc::__WNOTHREAD) } {
        -1 => Err(io::Error::last_os_error()).context("waitpid"),
        0 => Ok(None),
        tid => Ok(Some((tid, status))),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Child, Command, Stdio};

    use super::*;

    fn cat() -> Child {
        let mut cat = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        // Its first line is passed on: it waits for another.
        cat.stdin.as_mut().unwrap().write_all(b"a line\n").unwrap();
        std::thread::sleep(Duration::from_millis(100));
        cat
    }

    /// What is executed from one read to the next, by single steps.
    fn stepped(cat: &mut Child) -> u64 {
        let tid = pid_t::try_from(cat.id()).unwrap();
        let memory = File::open(format!("/proc/{tid}/mem")).unwrap();
        ptrace(libc::PTRACE_SEIZE, tid, 0, NOTHING).unwrap();
        ptrace(libc::PTRACE_INTERRUPT, tid, 0, NOTHING).unwrap();
        wait(0).unwrap();
        // Out of this read.
        ptrace(libc::PTRACE_SINGLESTEP, tid, 0, NOTHING).unwrap();
        cat.stdin.as_mut().unwrap().write_all(b"a line\n").unwrap();
        wait(0).unwrap();
        let (mut instructions, mut last) = (0, 0);
        loop {
            let now = registers(tid).unwrap();
            // One that is repeated is one.
            instructions += u64::from(now.rip != last);
            last = now.rip;
            let mut code = [0; 2];
            memory.read_exact_at(&mut code, now.rip).unwrap();
            if code == [0x0f, 0x05] && now.rax == libc::SYS_read as u64 {
                return instructions;
            }
            ptrace(libc::PTRACE_SINGLESTEP, tid, 0, NOTHING).unwrap();
            wait(0).unwrap();
        }
    }

    #[test]
    fn breakpoints_count_what_single_steps_count() {
        let mut cats = [cat(), cat()];
        let instructions = stepped(&mut cats[0]);
        assert!(instructions > 100, "{instructions}");
        let mut tracee = Tracee::attach(cats[1].id()).unwrap();
        let calls = [libc::SYS_read, libc::SYS_write].map(|number| (number as u64, 1)).into();
        for _ in 0..3 {
            cats[1].stdin.as_mut().unwrap().write_all(b"a line\n").unwrap();
            assert_eq!(tracee.count(|| true).unwrap(), Count { instructions, calls: Clone::clone(&calls) });
        }
        tracee.count_stacks(cats[1].id()).unwrap();
        cats[1].stdin.as_mut().unwrap().write_all(b"a line\n").unwrap();
        tracee.count(|| true).unwrap();
        let stacks = tracee.take_stacks();
        assert_eq!(
            stacks.values().sum::<u64>(),
            instructions,
            "each instruction is in one stack: {stacks:?}"
        );
        // cat calls the C library's function, returns from it, and calls the next one.
        let called = |name: &str| stacks.keys().any(|stack| stack.ends_with(&format!("cat;{name}")));
        assert!(called("read") || called("write"), "the C library's functions: {stacks:?}");
        let deepest = stacks.keys().map(|stack| stack.split(';').count()).max();
        assert!(deepest < Some(8), "each call has its return: {stacks:?}");
        assert!(tracee.take_stacks().is_empty());
        for mut cat in cats {
            cat.kill().unwrap();
            cat.wait().unwrap();
        }
    }
}
