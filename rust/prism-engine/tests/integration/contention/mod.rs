//! The job message by message: equal to the closed forms without contention, and what sharing does.

mod alone;
mod step;
