"""FlexFlow (Jia, Zaharia, Aiken 2019): cuts of every operation, searched on a simulator."""
