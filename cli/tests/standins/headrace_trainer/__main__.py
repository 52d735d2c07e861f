from standin_instance import run

run("trainer")
