#!/bin/sh
# mini-swe-agent as it is, in a copy of the repository: agent.sh TASK
cp -r "$(dirname "$0")/repository/." .
exec mini --yolo --exit-immediately --model openai/policy --config mini.yaml --config agent.step_limit=8 \
  --output trajectory.json --task "$1"
