//! Message programs.

mod program;
