"""Actors: the parent's half of a worker process, and the handles and futures that users get.

The way of a call, and of its reply:

    caller's thread     handle ── Call, ActorFuture ──▶ Actor ── JobQueue           future.result()
                                                          │    waits here until        ▲    reads the reply
                                                          │    the worker is free      │
    loop's thread                                         │                          Actor.on_frame ── JobQueue.on_reply
                                                          ▼                            ▲    finds the job of the reply
    the backend's                      ActorProcess ── Worker.send ── channel ── Worker.receive
    worker                                                     runs it

Only one job runs at a time, so a reply, a deadline, or an exit belongs to the running job. A thread that waits for the
reply may read the channel itself, in place of the loop (`loan`). When the process exits, `Actor.after_exit` decides
about the job, and about the next process.

Begin to read with `job`, `job_queue`, and the table of phases in `actor`.

For users:
    spawn           Makes actors, for users and for pools and vectors
    handle          Handles, whose methods return futures
    future          The future of a call, and the outcome that a thread reads when it asks
    states          States and statistics, phases, and the reasons why processes end
    bound           Objects that cannot be pickled

An actor with processes:
    base            The interface of all actors
    config          Its settings
    change          Its lock, and the rule about changes that an exception interrupts
    actor           One process after another: requests, frames, deadlines, exits
    starter         The start of a process: launches, and processes taken from standbys
    actor_process   One process, and the facts about its exit
    exits           Decisions after an exit, and the restart policy
    tenant          The record of the envs in the process, for vectors
    loan            Lends the channel to a waiting thread
    timers          Its timers, and the watch over deadlines
    spinning        When callers and workers spin before they sleep

Its jobs:
    job             The interface of jobs, and those that end a process
    calls           Calls, and replays of journals
    job_queue       Their order, from the queue to the worker and to their ends
    activity        The method of the env that a worker runs now
    permits         How many actors may step at a time (``max_running``)

An actor without a process:
    inline          Runs env code in the thread of the caller
    request_stack   Which env code runs in which thread

Errors, messages, and records of events:
    error_factory   Makes errors
    evidence        Stacks and tracebacks, with the frames of users first
    log             Log messages
    recording       The recorder of spans and exits, for traces

    latch, type_variables   Small helpers
"""
