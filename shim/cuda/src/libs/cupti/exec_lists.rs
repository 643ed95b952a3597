//! `execl`, `execlp` and `execle`: functions of libc that start a program from a list of arguments. libc's own go to
//! `execve` past every stand-in, so they are here, too, in terms of the stand-ins that take a vector ([`super::tsc`]).
//!
//! The caller has put the first arguments of the list into registers and the rest onto the stack, after the return address
//! (System V ABI, x86-64). With the return address out of the way and the registers pushed, all of them are one vector, as
//! the other functions want it. Nothing is copied, so any number of arguments works.

use super::tsc;
use std::ffi::{c_char, c_int};

type Strings = *const *const c_char;

/// As `execv` for `execl`.
///
/// # Safety
/// `path` and the strings of `argv`, which null ends, must be C strings.
unsafe extern "C" fn with_vector(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: passed on to the caller.
    unsafe { tsc::execv(path, argv) }
}

/// As `execvp` for `execlp`.
///
/// # Safety
/// As for [`with_vector`].
unsafe extern "C" fn with_search(file: *const c_char, argv: Strings) -> c_int {
    // SAFETY: passed on to the caller.
    unsafe { tsc::execvp(file, argv) }
}

/// As `execve` for `execle`, whose environment follows the null after the arguments.
///
/// # Safety
/// As for [`with_vector`]; after the null comes an environment.
unsafe extern "C" fn with_environment(path: *const c_char, argv: Strings) -> c_int {
    // SAFETY: the list ends with null, and one more pointer is behind it.
    unsafe {
        let mut end = argv;
        while !(*end).is_null() {
            end = end.add(1);
        }
        let environment: Strings = (*end.add(1)).cast();
        tsc::execve(path, argv, environment)
    }
}

macro_rules! listed {
    ($($name:ident => $vector:path;)*) => { $(
        /// As libc's function, for a program that may read the counter.
        ///
        /// # Safety
        /// As for libc's function. (Its type here is not that of libc: Rust has no name for a list of arguments.)
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name() -> c_int {
            core::arch::naked_asm!(
                "pop r11",             // the return address
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",        // the vector; the path is where it was, in rdi
                "push r11",            // and the stack is aligned for a call
                "call {vector}",       // returns only if there is no such program
                "pop r11",
                "add rsp, 40",
                "push r11",
                "ret",
                vector = sym $vector,
            )
        }
    )* };
}

listed! {
    execl => with_vector;
    execlp => with_search;
    execle => with_environment;
}

#[cfg(test)]
mod tests {
    use std::ffi::{CStr, c_int};
    use std::io::Write as _;

    /// Runs `exec` in a child whose counter traps; its exit code. `None`: this kernel cannot trap.
    fn exit_code(exec: impl FnOnce()) -> Option<c_int> {
        const CANNOT_TRAP: c_int = 99;
        // SAFETY: the child calls functions that are safe after a fork, and ends or becomes another program.
        let child = unsafe { libc::fork() };
        if child == 0 {
            if !super::tsc::trap_for_test() {
                // SAFETY: ends the child.
                unsafe { libc::_exit(CANNOT_TRAP) };
            }
            exec();
            // SAFETY: as above.
            unsafe { libc::_exit(98) };
        }
        let mut status = 0;
        // SAFETY: the status lives on this stack frame.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        let code = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { -libc::WTERMSIG(status) };
        if code == CANNOT_TRAP {
            let _ = writeln!(std::io::stderr(), "skipped: this kernel cannot trap the time stamp counter");
            return None;
        }
        Some(code)
    }

    const SHELL: &CStr = c"/bin/sh";
    const COUNT: &CStr = c"test $# = 8 && test $8 = h && date > /dev/null && exit 7";
    const NONE: *const libc::c_char = std::ptr::null();

    #[test]
    fn a_program_started_from_a_list_may_read_the_counter() {
        let (a, h, c) = (c"a".as_ptr(), c"h".as_ptr(), c"-c".as_ptr());
        let (shell, count) = (SHELL.as_ptr(), COUNT.as_ptr());
        // SAFETY: a list of C strings that null ends.
        let by_path = exit_code(|| unsafe {
            libc::execl(shell, shell, c, count, shell, a, a, a, a, a, a, a, h, NONE);
        });
        // SAFETY: as above.
        let by_name = exit_code(|| unsafe {
            libc::execlp(c"sh".as_ptr(), shell, c, count, shell, a, a, a, a, a, a, a, h, NONE);
        });
        let codes = [by_path, by_name];
        assert!(codes.iter().all(|code| code.is_none_or(|code| code == 7)), "{codes:?}");
    }

    #[test]
    fn the_environment_follows_the_list() {
        let test = c"test \"$ONLY\" = this && test -z \"$HOME\" && exit 7".as_ptr();
        let environment = [c"ONLY=this".as_ptr(), NONE];
        // SAFETY: a list of C strings that null ends, and an environment.
        let code = exit_code(|| unsafe {
            libc::execle(SHELL.as_ptr(), SHELL.as_ptr(), c"-c".as_ptr(), test, NONE, environment.as_ptr());
        });
        assert!(code.is_none_or(|code| code == 7), "{code:?}");
    }

    #[test]
    fn one_that_is_not_there_leaves_the_caller_as_it_was() {
        // SAFETY: a list of C strings that null ends.
        let code = unsafe { libc::execl(c"/nowhere/at/all".as_ptr(), SHELL.as_ptr(), NONE) };
        assert_eq!((code, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::ENOENT)));
    }
}
